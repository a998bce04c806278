"""Compiled programs and their inputs, kept in the worker that owns the device."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autotune.engines._memory import program_bytes
from autotune.engines._refusals import classify_compile_error, classify_run_error, text_of
from autotune.engines.device.hardware import memory_limit
from autotune.kernel import Compilable, Kernel
from autotune.outcome import Config, Outcome, Status
from autotune.render import memory
from autotune.space import format_config

# Inputs in rotation: together larger than most caches, so that no call finds its own still there. A set that is so by
# itself is the only one: another would take the memory that a program may need.
ROTATED_BYTES = 256 * 1024**2
MOST_SETS = 4
KEPT = 12  # programs, all of a race among them; a compiled one holds memory


@dataclasses.dataclass
class Program:
    """One compiled function with its inputs.

    Attributes:
        name: The function's, unique in this process: the profiler's trace knows it by that.
        call: The compiled function.
        inputs: Sets of arguments, taken in turn.
        overwrites: Positions of the arguments that a call takes for itself: each call gets copies.
        calls: How many calls make one sample long enough for a clock.
        compile_s: Seconds the compile took.
        peak_bytes: What the program takes, by its compiler's account.
        formats: How it wants each argument laid out and sharded.
        digest: Of what was compiled, as it was lowered.
    """

    name: str
    call: Callable[..., Any]
    inputs: InputSets
    overwrites: tuple[int, ...]
    compile_s: float
    peak_bytes: int | None
    formats: tuple[Any, ...]
    digest: str
    calls: int = 1
    turn: int = 0

    def next_arguments(self) -> tuple[Any, ...]:
        """The next set of inputs, as the program wants them; making them so is no part of its time."""
        self.turn += 1
        kept = self.inputs.sets[self.turn % len(self.inputs.sets)]
        return tuple(
            self._argument(place, array, wanted)
            for place, (array, wanted) in enumerate(zip(kept, self.formats, strict=True))
        )

    def _argument(self, place: int, kept: Any, wanted: Any) -> jax.Array:
        if isinstance(kept, jax.Array) and kept.format == wanted:
            return jnp.copy(kept) if place in self.overwrites else kept
        # An argument that the program does not read has no sharding; any placement serves it.
        if wanted.sharding is not None and not wanted.sharding.is_fully_addressable:
            # Other processes make the other parts, of the same inputs.
            return jax.make_array_from_callback(kept.shape, wanted, lambda index: kept[index])
        return jax.device_put(kept, wanted, may_alias=False)  # A donated alias would be the host's own.


class InputSets:
    """Random inputs, which are shown to be what they were after each measurement.

    On the device; those of a program for several stay with the host, as no single device may hold them all.

    Args:
        make: Gives a set of arguments from a seed.
        seed: Of the first set.
        nbytes: Of one set.
        spread: Whether they are for several devices.
    """

    def __init__(self, make: Callable[[int], tuple[Any, ...]], seed: int, nbytes: int, *, spread: bool = False) -> None:
        self._make, self._seed, self._spread = make, seed, spread
        self.nbytes = nbytes
        count = min(MOST_SETS, math.ceil(ROTATED_BYTES / max(1, nbytes)))
        self.sets = [self._place(number) for number in range(count)]
        # What stays with the host no kernel overwrites.
        self._fingerprints = [] if spread else [fingerprint(arrays) for arrays in self.sets]

    def _place(self, number: int) -> tuple[Any, ...]:
        if self._spread:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                return tuple(np.asarray(array) for array in self._make(self._seed + number))
        return jax.block_until_ready(tuple(jax.device_put(array) for array in self._make(self._seed + number)))

    def restore(self) -> bool:
        """Makes again what a kernel has overwritten; whether anything was."""
        changed = False
        for number, known in enumerate(self._fingerprints):
            if fingerprint(self.sets[number]) != known:
                self.sets[number] = self._place(number)
                changed = True
        return changed


@jax.jit
def _digest(arrays: tuple[Any, ...]) -> list[Any]:
    digests = []
    for array in arrays:
        words = array if array.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(array, f"uint{8 * array.itemsize}")
        words = words.astype(jnp.uint32).ravel()
        digests.append(jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1)))
    return digests


def fingerprint(arrays: tuple[Any, ...]) -> tuple[int, ...]:
    """A number for each array that another content has by chance only, one in four thousand million."""
    return tuple(int(digest) for digest in _digest(tuple(arrays)))


_numbers = itertools.count()
# Compiled, to be had with any inputs: a race compiles nothing that a trial has compiled.
_programs: OrderedDict[tuple[Any, ...], Callable[[InputSets], Program]] = OrderedDict()
_inputs: dict[tuple[Any, ...], InputSets] = {}


def input_sets(kernel: Kernel, problem: Any, seed: int) -> InputSets:
    """Shared by all programs of a problem. Those of one seed at a time: they may be large."""
    key = (kernel.name, problem, seed)
    if key not in _inputs:
        _inputs.clear()  # before the next are made
        if not kernel.spread:
            nbytes = sum(spec.nbytes for spec in kernel.arguments(problem))
            _inputs[key] = InputSets(lambda number: kernel.make_inputs(problem, number), seed, nbytes)
        else:
            leaves = jax.tree.leaves(jax.eval_shape(lambda: kernel.program_inputs(problem, seed)))
            nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            _inputs[key] = InputSets(
                lambda number: tuple(jax.tree.leaves(kernel.program_inputs(problem, number))), seed, nbytes, spread=True
            )
    return _inputs[key]


def forget_programs() -> None:
    """Frees what programs and inputs hold of the device's memory."""
    _programs.clear()
    _inputs.clear()


def load(kernel: Kernel, problem: Any, config: Config | None, seed: int) -> Program | Outcome:
    """The compiled kernel, or its reference where `config` is None; or why there is none, as an outcome."""
    key = (kernel.name, problem, format_config(config) if config is not None else None)
    if key not in _programs:
        compiled = _compile(_form(kernel, problem, config), kernel.devices(problem))
        if isinstance(compiled, Outcome):
            return compiled
        _programs[key] = compiled
        while len(_programs) > KEPT:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    try:
        return _programs[key](input_sets(kernel, problem, seed))
    except Exception as error:
        return classify_run_error(f"its inputs cannot be made: {text_of(error)}")


def _form(kernel: Kernel, problem: Any, config: Config | None) -> Callable[[], Compilable]:
    """What is to be compiled, with flat arguments; building it may raise whatever the kernel raises."""

    def on_one() -> Compilable:
        function = kernel.reference(problem) if config is None else kernel.bind(problem, config)
        specs = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in kernel.arguments(problem))
        overwritten = tuple(kernel.overwrites(problem)) if config is not None else ()
        return Compilable(function, specs, overwritten, kernel.options(problem))

    def on_many() -> Compilable:
        count = kernel.devices(problem)
        if len(jax.devices()) < count:
            raise ValueError(f"the problem is one for {count} devices, and there are {len(jax.devices())}")
        form = kernel.compilable(problem, config, jax.devices()[:count])
        leaves, structure = jax.tree.flatten(form.arguments)
        sizes = [len(jax.tree.leaves(argument)) for argument in form.arguments]
        owner = [place for place, size in enumerate(sizes) for _ in range(size)]
        donated = tuple(leaf for leaf, place in enumerate(owner) if place in form.donated)
        return Compilable(
            lambda *flat: form.function(*jax.tree.unflatten(structure, flat)), tuple(leaves), donated, form.options
        )

    return on_many if kernel.spread else on_one


def _compile(build: Callable[[], Compilable], devices: int) -> Callable[[InputSets], Program] | Outcome:
    started = time.monotonic()
    name = f"autotune_{next(_numbers)}"
    try:
        form = build()

        def named(*arguments: Any) -> Any:
            return form.function(*arguments)

        named.__name__ = name
        lowered = jax.jit(named, donate_argnums=form.donated).lower(*form.arguments)
    except Exception as error:  # whatever tracing raises is this config's own fault
        return Outcome(Status.LOWERING_ERROR, message=text_of(error), compile_s=time.monotonic() - started)
    try:
        compiled = lowered.compile(compiler_options=dict(form.options))
    except Exception as error:
        refusal = classify_compile_error(text_of(error))
        return dataclasses.replace(refusal, compile_s=time.monotonic() - started)
    compile_s = time.monotonic() - started
    peak_bytes = program_bytes(compiled, jax.default_backend())
    if too_large := _too_large(peak_bytes, devices):
        return dataclasses.replace(too_large, compile_s=compile_s, peak_bytes=peak_bytes)
    formats = tuple(compiled.input_formats[0])
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
    return lambda inputs: Program(name, compiled, inputs, form.donated, compile_s, peak_bytes, formats, digest)


def _too_large(peak_bytes: int | None, devices: int) -> Outcome | None:
    """Refuses what the device cannot hold: a CPU's process would be killed for it, and others with it.

    Args:
        peak_bytes: What the program takes of each device.
        devices: That it is spread over; those of a CPU share one memory.
    """
    limit = memory_limit(jax.local_devices()[0].memory_stats())
    if limit is None or peak_bytes is None:
        return None
    needed = peak_bytes * (min(devices, jax.local_device_count()) if jax.default_backend() == "cpu" else 1)
    if needed <= limit:
        return None
    text = f"the program takes {memory(needed)}, and there are {memory(limit)}"
    return Outcome(Status.HBM_OOM, over_bytes=needed - limit, message=text)

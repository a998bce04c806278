"""Numerical validation of a config: what was not shown right never becomes a preset.

The kernel runs with the config on small problems, on the CPU, in Pallas' TPU interpreter: DMAs, semaphores and
grid as on a TPU, memory that nobody wrote and reads past an array's end as NaN. Its result is held against the
reference computed in float32. The device engine holds results of full size against it by the same rules.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.outcome import Config, Status

if TYPE_CHECKING:
    import jax
    import numpy as np

    from autotune.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Validation:
    """The verdict on one config, over all of its small problems.

    Attributes:
        status: ok, wrong_result, lowering_error, runtime_error, timeout or crash.
        max_rel_error: Largest ``|got - want|₂ / |want|₂`` over the problems; None where nothing was computed.
        max_element_error: Largest ``|got - want|`` of an element, over its own size or the root mean square of its
            row, whichever is larger.
        tolerance: What `max_rel_error` was held to.
        problems: The small problems that were run, as text.
        message: What went wrong, and on which problem.
    """

    status: Status
    max_rel_error: float | None = None
    max_element_error: float | None = None
    tolerance: float | None = None
    problems: tuple[str, ...] = ()
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Validation:
        fields = dict(fields)
        return cls(**{**fields, "status": Status(fields["status"]), "problems": tuple(fields["problems"])})


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What an error may be.

    Attributes:
        rel: Of the whole, in the norm.
        element: Of the worst element, over its own size or its row's root mean square, whichever is larger.
        row: Of the whole result's root mean square: a row smaller than that is measured as if it were so large.
    """

    rel: float
    element: float
    row: float


# Rounding a result to bfloat16 is off by at most 2^-9 of the value and by 2^-9.2 in the norm. Kernels
# that keep their sums in float32 but feed rounded intermediates to the MXU (attention's probabilities) come to
# a little more; 2^-8 is more than twice that. One element can have all its roundings add up: 2^-5.
# Float32 sums of some thousand terms are off by 1e-7 to 1e-6 in the norm: 2^-17 leaves a factor of about eight. Where
# terms cancel (the gradient of a query whose weights are all on one key) what is left of a row is rounding of its
# terms, up to 1e-5 of the whole's size: rows below a quarter of that are held to 3e-5 of it, far below a fault.
TOLERANCES = {
    "bfloat16": Tolerance(2.0**-8, 2.0**-5, 0.01),
    "float32": Tolerance(2.0**-17, 2.0**-13, 0.25),
}
# Float8 operands are exact, their products' float32 sums leave as bfloat16.
TOLERANCES |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), TOLERANCES["bfloat16"])
_ELEMENTS_AT_ONCE = 1 << 22


def validate(kernel: Kernel, problem: Any, config: Config, *, seed: int = 0) -> Validation:
    """Compares `kernel` with its reference under `config`. Never raises for what the kernel does.

    Args:
        kernel: The kernel; `validation_problems` says what is run, each on random inputs.
        problem: The problem that the config is for.
        config: A config that satisfies the space's constraints.
        seed: Of the inputs.

    Returns:
        The verdict. It stops at the first problem that fails.
    """
    rel = element = 0.0
    done: list[str] = []
    try:
        problems = kernel.validation_problems(problem, config)
    except Exception as error:  # A third party's kernel may do anything.
        return Validation(Status.RUNTIME_ERROR, message=f"validation_problems: {_text(error)}")
    if not problems:
        return Validation(Status.RUNTIME_ERROR, message="the kernel names no problems to validate on")
    for small in problems:
        one = _validate_one(kernel, small, config, seed)
        rel, element = _worse(rel, one.max_rel_error), _worse(element, one.max_element_error)
        done.append(str(small))
        if not one.ok or small is problems[-1]:
            return dataclasses.replace(one, max_rel_error=rel, max_element_error=element, problems=tuple(done))
    raise AssertionError("unreachable")


def _validate_one(kernel: Kernel, problem: Any, config: Config, seed: int) -> Validation:
    import jax
    from jax.experimental.pallas import tpu as pltpu

    interpret = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")
    phase = Status.LOWERING_ERROR
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        try:
            inputs = kernel.make_inputs(problem, seed)
            lowered = jax.jit(kernel.bind(problem, config, interpret=interpret)).lower(*inputs)
            phase = Status.RUNTIME_ERROR
            # A callback's error comes with the wait, and not with the call.
            got = jax.tree.leaves(jax.block_until_ready(lowered.compile()(*inputs)))
            want, shapes = reference_results(kernel, problem, inputs)
        except Exception as error:
            pltpu.reset_tpu_interpret_mode_state()  # A run that stopped half way leaves its memory behind.
            return Validation(phase, message=f"{problem}: {_text(error)}")
    return compare_results(got, want, shapes, inputs, str(problem))


def compare_results(
    got: Sequence[Any], want: Sequence[np.ndarray], shapes: Sequence[Any], inputs: Sequence[Any], where: str
) -> Validation:
    """Holds a kernel's results against the reference's.

    Args:
        got: The kernel's.
        want: The reference's, as float32.
        shapes: What shape and dtype each should have.
        inputs: What both were given: its dtypes say how exact a result can be.
        where: Begins the message.
    """
    if len(got) != len(want):
        return Validation(Status.WRONG_RESULT, message=f"{where}: {len(got)} results, not {len(want)}")
    verdicts = []
    for number, (array, right, shape) in enumerate(zip(got, want, shapes, strict=True)):
        which = where if len(got) == 1 else f"{where}: result {number}"
        if array.dtype != shape.dtype:
            return Validation(Status.WRONG_RESULT, message=f"{which} is {array.dtype}, not {shape.dtype}")
        tolerance = max((TOLERANCES[name] for name in _dtypes([*inputs, array])), key=lambda one: one.rel)
        verdicts.append(compare(_to_numpy(array), right, tolerance, which))
    return worst(verdicts)


def _dtypes(arrays: list[Any]) -> set[str]:
    """The floating ones: the coarsest of them says how exact a result can be. Integers are compared as float32."""
    import jax.numpy as jnp

    return {str(array.dtype) for array in arrays if jnp.issubdtype(array.dtype, jnp.floating)} or {"float32"}


def worst(verdicts: list[Validation]) -> Validation:
    """The first that failed, else all as one: of each error the largest, with the tolerance of the worst."""
    failed = next((verdict for verdict in verdicts if not verdict.ok), None)
    if failed is not None:
        return failed
    worst = max(verdicts, key=lambda verdict: (verdict.max_rel_error or 0.0) / (verdict.tolerance or 1.0))
    element = max(verdict.max_element_error or 0.0 for verdict in verdicts)
    return dataclasses.replace(worst, max_element_error=element)


def reference_results(
    kernel: Kernel, problem: Any, inputs: tuple[Any, ...]
) -> tuple[list[np.ndarray], list[jax.ShapeDtypeStruct]]:
    """The reference's results on the same values, computed in float32 throughout, and what they should be."""
    import jax
    import jax.numpy as jnp

    wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in inputs]
    with jax.default_matmul_precision("highest"):
        want = [_to_numpy(array) for array in jax.tree.leaves(jax.jit(kernel.validation_reference(problem))(*wide))]
    return want, jax.tree.leaves(jax.eval_shape(kernel.reference(problem), *inputs))


def compare(got: np.ndarray, want: np.ndarray, tolerance: Tolerance, where: str) -> Validation:
    """Holds `got` against `want`, both float32; `where` names the problem in the message."""
    import numpy as np

    if blind := _would_pass(want, tolerance):
        return Validation(
            Status.RUNTIME_ERROR, tolerance=tolerance.rel, message=f"{where}: nothing is shown, as {blind} would pass"
        )
    wrong = ""
    rel = element = None
    if got.shape != want.shape:
        wrong = f"the result's shape is {got.shape}, not {want.shape}"
    elif bad := int(np.count_nonzero(~np.isfinite(got))):
        wrong = f"{bad} of {got.size} elements are NaN or infinite, the first at {_first(~np.isfinite(got))}"
    else:
        rel, element, worst = _errors(got, want, tolerance.row)
        if rel > tolerance.rel:
            wrong = f"relative error {rel:.2e} exceeds {tolerance.rel:.2e}, worst at {worst}"
        elif element > tolerance.element:
            wrong = f"the element at {worst} is off by {element:.2e} (allowed {tolerance.element:.2e})"
    status = Status.WRONG_RESULT if wrong else Status.OK
    return Validation(status, rel, element, tolerance.rel, message=f"{where}: {wrong}" if wrong else "")


def _would_pass(want: np.ndarray, tolerance: Tolerance) -> str:
    """What wrong result the tolerance would let through on this reference; "" if it catches them all.

    A reference of zeros passes a kernel that does nothing, one that hardly varies passes a kernel that mixes
    up its blocks.
    """
    import numpy as np

    if not np.all(np.isfinite(want)):
        return "the reference is not finite: anything"
    if want.size == 1:
        return "" if np.any(want) else "zeros"
    for name, value in {"zeros": 0.0, "a constant": want.mean(dtype=np.float64)}.items():
        if not _errors(np.broadcast_to(np.float32(value), want.shape), want, tolerance.row)[0] > 4 * tolerance.rel:
            return name
    for axis, length in enumerate(want.shape):
        if length > 1 and not _errors(np.roll(want, 1, axis), want, tolerance.row)[0] > 4 * tolerance.rel:
            return f"a result shifted by one along axis {axis}"
    return ""


def _errors(got: np.ndarray, want: np.ndarray, smallest_row: float) -> tuple[float, float, tuple[int, ...]]:
    """The relative norm error, the worst element's error and where that is.

    An element is measured by its row (the last axis): attention's first rows are values as they come, its last
    ones averages over thousands, an order of magnitude smaller. Rows are taken some at a time: results of full size
    in float64 would not fit.
    """
    import numpy as np

    width = want.shape[-1] if want.ndim else 1
    got_rows, want_rows = got.reshape(-1, width), want.reshape(-1, width)
    step = max(1, _ELEMENTS_AT_ONCE // max(1, width))
    chunks = [slice(start, start + step) for start in range(0, len(want_rows), step)]
    norm = math.sqrt(sum(np.square(want_rows[rows], dtype=np.float64).sum() for rows in chunks))
    floor = smallest_row * norm / math.sqrt(want.size) or 1.0
    off_squares, element, place = 0.0, -1.0, 0
    for rows in chunks:
        right = np.abs(want_rows[rows])
        off = np.abs(got_rows[rows] - want_rows[rows])
        off_squares += np.square(off, dtype=np.float64).sum()
        row = np.sqrt(np.square(right, dtype=np.float64).mean(axis=1, keepdims=True))
        scaled = off / np.maximum(right, np.maximum(row, floor))
        if (largest := float(scaled.max())) > element:
            element, place = largest, rows.start * width + int(np.argmax(scaled))
    rel = math.sqrt(off_squares) / norm if norm else math.nan
    return rel, element, tuple(int(i) for i in np.unravel_index(place, want.shape))


def _first(mask: np.ndarray) -> tuple[int, ...]:
    import numpy as np

    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def _worse(so_far: float | None, error: float | None) -> float | None:
    return None if so_far is None or error is None else max(so_far, error)


def _to_numpy(array: Any) -> np.ndarray:
    import numpy as np

    return np.asarray(array).astype(np.float32)


def _text(error: Exception) -> str:
    """The exception in one paragraph: its type and the last line of its traceback's text."""
    return " ".join("".join(traceback.format_exception_only(error)).split())[:2000]

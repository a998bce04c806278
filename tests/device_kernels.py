"""Kernels that misbehave on purpose when they run on a CPU, for the device engine's tests. A worker imports them.

The deeds are done in real memory: XLA calls a function of this process with the addresses of its buffers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.problem import Problem
from autotune.space import Param, Space

Float = ctypes.POINTER(ctypes.c_float)
calls = 0
left_over: np.ndarray | None = None


def work(x: np.ndarray, out: np.ndarray) -> None:
    out[:] = 2 * x


def slow(x: np.ndarray, out: np.ndarray) -> None:
    time.sleep(0.02)
    work(x, out)


def hang(x: np.ndarray, out: np.ndarray) -> None:
    while True:
        time.sleep(0.01)


def abort(x: np.ndarray, out: np.ndarray) -> None:
    os.abort()


def nothing(x: np.ndarray, out: np.ndarray) -> None:
    """Leaves its result as it finds it."""


def partly(x: np.ndarray, out: np.ndarray) -> None:
    """Leaves the last row unwritten."""
    out[:-1] = 2 * x[:-1]


def stale(x: np.ndarray, out: np.ndarray) -> None:
    """Gives what the first call came to."""
    global left_over
    if left_over is None:
        left_over = 2 * x
    out[:] = left_over


def once(x: np.ndarray, out: np.ndarray) -> None:
    """Right on odd calls, and off by one in a place on even ones."""
    global calls
    calls += 1
    work(x, out)
    out[0, 0] += float(calls % 2 == 0)


def wobble(x: np.ndarray, out: np.ndarray) -> None:
    """Right as far as the tolerance goes, and never the same."""
    global calls
    calls += 1
    out[:] = 2 * x * np.float32(1 + 2.0**-22 * (calls % 7))


def confine(x: np.ndarray, out: np.ndarray, more: int = 64 << 20) -> None:
    """From now on this process gets hardly more memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    work(x, out)


def squeeze(x: np.ndarray, out: np.ndarray) -> None:
    """Called while the program holds 256 MiB: it does not get half of them again."""
    confine(x, out, -128 << 20)


def overwrite(x: np.ndarray, out: np.ndarray) -> None:
    work(x, out)
    x[3, 3] = 99.0


DEEDS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    one.__name__: one
    for one in (work, slow, hang, abort, nothing, partly, stale, once, wobble, confine, squeeze, overwrite)
}


@functools.cache
def registered(deed: str, n: int) -> str:
    """The name under which XLA calls the deed."""
    import jax

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    def call(out: int, operands: Any) -> None:
        arrays = [np.ctypeslib.as_array(ctypes.cast(address, Float), (n, n)) for address in (operands[0], out)]
        DEEDS[deed](*arrays)

    kept.append(call)
    address = ctypes.cast(call, ctypes.c_void_p).value
    jax.ffi.register_ffi_target(f"deed_{deed}_{n}", jax.ffi.pycapsule(address), platform="cpu", api_version=0)
    return f"deed_{deed}_{n}"


kept: list[Any] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeedProblem(Problem):
    n: int = 256
    dtype: str = "float32"


class DeedKernel(Kernel):
    """Doubles its argument, or does what its config's `deed` says while it runs."""

    name = "deed"
    summary = "for tests"
    problem_type = DeedProblem
    problems: ClassVar = {"only": DeedProblem()}
    sources = ("device_kernels",)
    platforms = ("cpu",)

    def space(self, problem, chip):
        return Space(
            [
                Param(
                    "deed",
                    (*(name for name in DEEDS if name != "squeeze"), "xla", "too_large", "exhaust", "unlowerable"),
                    "what goes wrong",
                )
            ],
            [],
        )

    def arguments(self, problem):
        return (ArraySpec((problem.n, problem.n), problem.dtype),)

    def bind(self, problem, config, *, interpret=False):
        import jax
        import jax.numpy as jnp

        deed = config["deed"]
        # The interpreter's small problems show none of it: only the device does.
        if deed == "xla" or problem.n < 100:
            return lambda x: x * 2
        if deed == "unlowerable":
            raise RuntimeError("this kernel never works")
        shape = jax.ShapeDtypeStruct((problem.n, problem.n), jnp.float32)

        def call(name, x):
            return jax.ffi.ffi_call(registered(name, problem.n), shape, custom_call_api_version=1)(x)

        def large(x, rows):
            """2 x by way of `rows` MiB."""
            table = jnp.zeros((rows, 1 << 18), jnp.float32).at[x[0, 0].astype(int)].set(1.0)
            return x * 2 + 0 * jnp.cumsum(table, axis=1)[-1, -1]

        if deed == "too_large":
            return lambda x: large(x, 1 << 24)
        if deed == "exhaust":
            return lambda x: large(call("squeeze", x) / 2, 1 << 8)
        return functools.partial(call, deed)

    def reference(self, problem):
        return lambda x: x * 2

    def baselines(self, problem, chip):
        return {"default": {"deed": "slow"}}

    def cost(self, problem):
        return Cost(flops=1.0, nbytes=2 * self.arguments(problem)[0].nbytes, dtype="float32")

    def estimate_ms(self, problem, config, chip):
        return 1.0

    def validation_problems(self, problem, config):
        return [DeedProblem(n=16)]


class TakingKernel(DeedKernel):
    """Takes its argument's memory for the result, and says so."""

    name = "taking"

    def overwrites(self, problem):
        return (0,)

    def bind(self, problem, config, *, interpret=False):
        return lambda x: x * 2


def chip_after_a_while() -> str:
    """So long that two of these need two workers."""
    time.sleep(1)
    return os.environ["TPU_VISIBLE_CHIPS"]

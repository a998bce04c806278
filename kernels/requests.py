"""Which kernels a program asks configs for, and for which problems: what to tune, and what it takes."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from autotune.problem import Problem


@dataclasses.dataclass(frozen=True)
class Request:
    """One instance of a kernel in a program.

    Attributes:
        kernel: Its registered name.
        problem: Its shapes, dtype and options.
    """

    kernel: str
    problem: Problem


_open: contextvars.ContextVar[dict[Request, None] | None] = contextvars.ContextVar("requests", default=None)


@contextlib.contextmanager
def requested() -> Iterator[dict[Request, None]]:
    """Collects what is asked for by the kernels' functions that are traced in this context, each once, in order.

    It needs no TPU. What a jitted function's trace has been kept of is not traced again, and asks for nothing.

    Example:
        >>> with requested() as asked:
        ...     jax.eval_shape(jax.grad(loss), parameters, batch)
        >>> for request in asked:
        ...     print(f"python -m autotune {request.kernel} --target v5e --problem {request.problem}")
    """
    asked: dict[Request, None] = {}
    token = _open.set(asked)
    try:
        yield asked
    finally:
        _open.reset(token)


def note(kernel: str, problem: Problem) -> None:
    """Adds one to what is collected, if anything is."""
    if (asked := _open.get()) is not None:
        asked[Request(kernel, problem)] = None

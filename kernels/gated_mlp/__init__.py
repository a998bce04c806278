"""Gate and up of an MLP (SwiGLU, GeGLU): ``from kernels.gated_mlp import gated_mlp``. Importing this loads no jax."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "GatedMlpProblem": "problem",
    "PROBLEMS": "problem",
    "gated_mlp": "api",
    "gated_mlp_reference": "reference",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Loads the exported names on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""An automated tuner for JAX kernels on TPUs, with or without the TPU.

Importing this package loads neither jax, optuna nor pandas.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["tunable"]


def __getattr__(name: str) -> Any:
    if name == "tunable":
        from autotune.own import tunable

        return tunable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

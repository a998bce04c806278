"""What a grouped matmul instance is, how its rows fall to the groups, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from autotune.errors import UsageError
from kernels.matmul.problem import TiledProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProblem(TiledProblem):
    """Rows of ``lhs[m, k]`` sorted by group (tokens by expert), and a ``[k, n]`` matrix for each group.

    Attributes:
        groups: Groups (experts); any of them may have no rows.
        skew: Spread of the routing that a time is for: each group's share of the rows is drawn in proportion to
            exp(skew · a standard normal number). 0 is an even chance for all; at 0.5 the largest of 128 groups
            has about three times the mean.
    """

    groups: int
    skew: float = 0.5

    def check(self) -> None:
        if not 0 <= self.skew <= 10 or math.isnan(self.skew):
            raise UsageError(f"skew={self.skew}: must be between 0 and 10")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulProblem(GroupedProblem):
    """``out[i] = lhs[i] @ rhs[group of i]``, ``[m, n]``.

    Attributes:
        transpose_rhs: Whether rhs is ``[groups, n, k]``. The gradient of lhs is such a product, with the forward
            pass' n and k swapped.
    """

    transpose_rhs: bool = False


@functools.lru_cache(maxsize=256)
def routed(m: int, groups: int, skew: float) -> np.ndarray:
    """``[groups]`` int32: a draw of the rows of each group, m in all, the same one each time."""
    rng = np.random.default_rng(groups)
    popularity = np.exp(skew * rng.standard_normal(groups))
    sizes = rng.multinomial(m, popularity / popularity.sum()).astype(np.int32)
    sizes.setflags(write=False)
    return sizes


# Expert counts, sizes and experts per token: each model's public config.json. Rows: tokens times experts per token.
_MODELS = {
    "qwen3-30b-a3b": {"m": 4096 * 8, "hidden": 2048, "mlp": 768, "groups": 128},
    "mixtral-8x7b": {"m": 8192 * 2, "hidden": 4096, "mlp": 14336, "groups": 8},
    "deepseek-v3": {"m": 4096 * 8, "hidden": 7168, "mlp": 2048, "groups": 256},
    "llama4-scout": {"m": 8192, "hidden": 5120, "mlp": 8192, "groups": 16},
    "gpt-oss-120b": {"m": 4096 * 4, "hidden": 2880, "mlp": 2880, "groups": 128},
}


def _layers() -> dict[str, dict[str, int]]:
    """The products of one expert layer: up (and gate, of the same sizes), and down."""
    layers = {}
    for model, sizes in _MODELS.items():
        rows = {"m": sizes["m"], "groups": sizes["groups"]}
        layers[f"{model}-up"] = {**rows, "k": sizes["hidden"], "n": sizes["mlp"]}
        layers[f"{model}-down"] = {**rows, "k": sizes["mlp"], "n": sizes["hidden"]}
    return layers


PROBLEMS: dict[str, GroupedMatmulProblem] = {
    **{name: GroupedMatmulProblem(**sizes) for name, sizes in _layers().items()},
    "qwen3-30b-a3b-decode-up": GroupedMatmulProblem(m=128 * 8, groups=128, k=2048, n=768),
    **{
        f"{name}-dlhs": GroupedMatmulProblem(**{**sizes, "k": sizes["n"], "n": sizes["k"]}, transpose_rhs=True)
        for name, sizes in _layers().items()
    },
}
DRHS_PROBLEMS: dict[str, GroupedProblem] = {name: GroupedProblem(**sizes) for name, sizes in _layers().items()}

"""The search space of tokamax' attention, and the kernel as the tuner sees it, where tokamax is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.chips import Chip
from autotune.kernel import ArraySpec
from autotune.outcome import Config
from autotune.space import Param, Space
from kernels._tpu_model import LANES
from kernels.stock.problem import TOKAMAX_ATTENTION_PROBLEMS, TokamaxAttentionProblem
from search_spaces.attention import few_of_each
from search_spaces.stock._common import as_python
from search_spaces.stock.splash import StockSplashKernel, one_by_one

if TYPE_CHECKING:
    import jax

LAYOUTS = ("HEAD_DIM_MINOR", "SEQ_MINOR")
OPS = "tokamax._src.ops"


class TokamaxAttentionKernel(StockSplashKernel):
    """``tokamax.dot_product_attention(..., implementation="mosaic_tpu")``, forward: a splash kernel of its own."""

    name = "tokamax_attention"
    summary = "tokamax' attention (pip install tokamax), forward: its Config, layouts and scheduler among it"
    problem_type = TokamaxAttentionProblem
    problems = TOKAMAX_ATTENTION_PROBLEMS
    sources = (
        f"{OPS}.attention.pallas_mosaic_tpu",
        f"{OPS}.experimental.tpu.splash_attention.splash_attention_kernel",
    )
    blocks = ("block_q", "block_kv", "block_kv_compute")
    others = ("q_layout", "k_layout", "v_layout", "use_experimental_scheduler", "use_base2_exp")
    relatives = {"attention": {name: name for name in (*blocks, *others)}}

    def space(self, problem: TokamaxAttentionProblem, chip: Chip) -> Space:
        shared = super().space(problem, chip)
        docs = ("queries", "keys", "values")
        params = [
            *shared.params.values(),
            *(
                Param(name, LAYOUTS, f"which dimension of {doc} lies along the lanes", LAYOUTS[0])
                for name, doc in zip(self.others, docs, strict=False)
            ),
            Param("use_experimental_scheduler", (True, False), "of the compiler, in the loop over keys", True),
            Param("use_base2_exp", (True, False), "exponentials to the base 2", True),
        ]
        return Space(params, shared.constraints)

    def arguments(self, problem: TokamaxAttentionProblem) -> tuple[ArraySpec, ...]:
        def of(length: int, heads: int) -> ArraySpec:
            return ArraySpec((problem.batch, length, heads, problem.head_dim), problem.dtype)

        keys = of(problem.kv_len, problem.kv_heads)
        return of(problem.q_len, problem.heads), keys, keys

    def make_inputs(self, problem: TokamaxAttentionProblem, seed: int) -> tuple[jax.Array, ...]:
        import jax

        specs = self.arguments(problem)
        keys = jax.random.split(jax.random.key(seed), len(specs))
        return tuple(jax.random.normal(k, s.shape).astype(s.dtype) for k, s in zip(keys, specs, strict=True))

    def bind(
        self, problem: TokamaxAttentionProblem, config: Config, *, interpret: Any = False
    ) -> Callable[..., jax.Array]:
        from kernels.stock._tokamax import tokamax_attention

        return one_by_one(functools.partial(tokamax_attention, **problem.options, config=config), interpret)

    def reference(self, problem: TokamaxAttentionProblem) -> Callable[..., jax.Array]:
        return self._reordered(super().reference(problem))

    def validation_reference(self, problem: TokamaxAttentionProblem) -> Callable[..., jax.Array]:
        return self._reordered(super().validation_reference(problem))

    @staticmethod
    def _reordered(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: function(*(array.swapaxes(1, 2) for array in arrays)).swapaxes(1, 2)

    def baselines(self, problem: TokamaxAttentionProblem, chip: Chip) -> dict[str, Config]:
        """What tokamax takes for shapes that its caches do not have."""
        space = self.space(problem, chip)
        return {"default": space.parse(dict.fromkeys(self.blocks, LANES))}

    def validation_problems(self, problem: TokamaxAttentionProblem, config: Config) -> list[TokamaxAttentionProblem]:
        return few_of_each(problem, config["block_q"], config["block_kv"])

    def terms(self, problem: TokamaxAttentionProblem, config: Config) -> Mapping[str, str]:
        return {"tokamax": as_python("Config", config)}

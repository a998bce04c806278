"""The search spaces of attention's backward kernels, and these as the tuner sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import MIB, Chip
from autotune.errors import UsageError
from autotune.kernel import ArraySpec, Cost
from autotune.outcome import Config
from autotune.space import Constraint, Param, Space
from kernels._tpu_model import LANES
from kernels.attention import cost as model
from kernels.attention.problem import AttentionProblem
from search_spaces._common import (
    block_candidates,
    block_constraint,
    vmem_limit_constraint,
    vmem_param,
)
from search_spaces.attention import (
    LARGEST_BLOCK,
    LARGEST_CODE,
    LARGEST_TILE,
    AttentionKernel,
    part_constraints,
    tile_sides,
)

if TYPE_CHECKING:
    import jax


class _BackwardKernel(AttentionKernel):
    """What all have in common: arguments, blocks, and the small problems they are validated on."""

    sources = (
        "kernels.attention.backward",
        "kernels.attention.backward_tiles",
        "kernels.attention.tiles",
        "kernels.attention.blocks",
        "kernels.attention.reference",
        "kernels._precision",
        "kernels._compiler",
    )
    relatives: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "attention_bwd": {
            "block_q": "block_q_dkv",
            "block_kv": "block_kv_dkv",
            "block_kv_compute": "block_kv_dkv_compute",
        }
    }
    function: ClassVar[str]  # in `kernels.attention.backward`; and what gives the same in `kernels.attention.reference`
    same: ClassVar[str]
    of_queries: ClassVar[bool] = False  # whether it gives the gradient of q
    of_keys: ClassVar[bool] = False  # whether it gives those of k and v

    def space(self, problem: AttentionProblem, chip: Chip) -> Space:
        # Queries lie along the lanes, in blocks and in tiles.
        sizes = {"block_q": problem.q_len, "block_kv": problem.kv_len}
        blocks = {name: block_candidates(size, LANES, largest=LARGEST_BLOCK) for name, size in sizes.items()}
        params = [
            Param("block_q", blocks["block_q"], "queries per block"),
            Param("block_kv", blocks["block_kv"], "keys per block"),
            *(
                Param(
                    f"{name}_compute",
                    tile_sides(candidates, LANES),
                    f"{'queries' if name == 'block_q' else 'keys'} per tile of scores",
                    default=lambda config, name=name: model.tile_part(config[name], LANES, LARGEST_TILE // 2),
                )
                for name, candidates in blocks.items()
            ),
            vmem_param(chip),
        ]
        constraints = [
            block_constraint("block_q", "q_len", problem.q_len, LANES),
            block_constraint("block_kv", "kv_len", problem.kv_len, LANES),
            *part_constraints("block_q", LANES),
            *part_constraints("block_kv", LANES),
            Constraint(
                f"block_q_compute x block_kv_compute must be at most {LARGEST_CODE // 2} scores: the compiler takes "
                "minutes for more, and the chip fetches its code anew every pass",
                lambda config: config["block_q_compute"] * config["block_kv_compute"] <= LARGEST_CODE // 2,
            ),
            vmem_limit_constraint(chip),
            Constraint(
                "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
                lambda config: self._vmem_bound(problem, config) <= config["vmem_limit_mib"] * MIB,
            ),
        ]
        return Space(params, constraints)

    def _vmem_bound(self, problem: AttentionProblem, config: Config) -> int:
        return model.backward_vmem_lower_bound(problem, config, of_queries=self.of_queries, of_keys=self.of_keys)

    def arguments(self, problem: AttentionProblem) -> tuple[ArraySpec, ...]:
        q, k, v, *segments = super().arguments(problem)
        grad = ArraySpec((*q.shape[:3], problem.value_dim), problem.dtype)
        statistic = ArraySpec(q.shape[:3], "float32")
        return q, k, v, grad, statistic, statistic, *segments

    def make_inputs(self, problem: AttentionProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random q, k, v and grad; the statistics are those of their forward pass."""
        import jax
        import jax.numpy as jnp

        from kernels.attention.reference import attention_lse, attention_reference

        q, k, v, grad, _, _, *segments = super().make_inputs(problem, seed)
        q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
        out = jax.jit(functools.partial(attention_reference, **problem.options))(q32, k32, v32, *segments)
        lse = jax.jit(functools.partial(attention_lse, **problem.options))(q32, k32, *segments)
        return q, k, v, grad, lse, jnp.sum(grad.astype(jnp.float32) * out, axis=-1), *segments

    def bind(self, problem: AttentionProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        from kernels.attention import backward

        return functools.partial(getattr(backward, self.function), **problem.options, **config, interpret=interpret)

    def reference(self, problem: AttentionProblem) -> Callable[..., Any]:
        from kernels.attention import reference

        return functools.partial(getattr(reference, self.same), **problem.options)

    def validation_reference(self, problem: AttentionProblem) -> Callable[..., Any]:
        return self.reference(problem)

    def heuristic(self, problem: AttentionProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(model.backward_heuristic_config(problem))

    def cost(self, problem: AttentionProblem) -> Cost:
        return model.backward_cost(problem, of_queries=self.of_queries, of_keys=self.of_keys)

    def estimate_ms(self, problem: AttentionProblem, config: Config, chip: Chip) -> float:
        return model.backward_estimate_ms(problem, config, chip, of_queries=self.of_queries, of_keys=self.of_keys)


class AttentionDqKernel(_BackwardKernel):
    """The gradient with respect to q: see `kernels.attention.backward`."""

    name = "attention_dq"
    summary = "attention's gradient with respect to q; backward flash kernel"
    function, same = "attention_dq_pallas", "attention_dq_reference"
    of_queries = True


class AttentionDkvKernel(_BackwardKernel):
    """The gradients with respect to k and v: see `kernels.attention.backward`."""

    name = "attention_dkv"
    summary = "attention's gradients with respect to k and v; backward flash kernel"
    function, same = "attention_dkv_pallas", "attention_dkv_reference"
    of_keys = True


class AttentionBwdKernel(_BackwardKernel):
    """All gradients in one pass: see `kernels.attention.backward`."""

    name = "attention_bwd"
    summary = "attention's gradients with respect to q, k and v at once; fused backward flash kernel"
    function, same = "attention_bwd_pallas", "attention_bwd_reference"
    of_queries = of_keys = True

    def heuristic(self, problem: AttentionProblem, chip: Chip) -> Config:
        """The blocks of the others, under a limit that leaves room for the sums of a whole kv head."""
        config = model.fused_heuristic_config(problem, chip)
        if config is None:
            raise UsageError(
                f"{self.name}: the sums of a whole kv head of {problem} leave no room in the VMEM of {chip.name}: "
                "use attention_dq and attention_dkv (backward='split')"
            )
        return self.space(problem, chip).parse(config)

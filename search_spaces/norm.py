"""The norms' search spaces, and the norms as the tuner sees them: two kinds, each forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import MIB, Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Constraint, Param, Space, aligned_divisors
from kernels._tpu_model import cdiv, round_up, sublanes
from kernels.norm import cost as model
from kernels.norm.problem import LAYERNORM_PROBLEMS, RMSNORM_PROBLEMS, Kind, NormProblem
from search_spaces._common import block_candidates, few_blocks, spread, uneven, vmem_limit_constraint, vmem_param

if TYPE_CHECKING:
    import jax

EPS = 1e-6
LARGEST_CODE = 1024 * 1024
MANY_TILES = 8
DEFAULT_ROWS = 256
SCALES = (1.0, 1e-3, 4.0)  # of the rows that validation takes: among them one whose mean square is about eps


class _NormKernel(Kernel):
    """Everything but which norm it is, and which direction.

    Attributes:
        kind: Which norm.
        backward: Whether it is the gradients.
    """

    kind: ClassVar[Kind]
    backward: ClassVar[bool] = False
    problem_type = NormProblem
    sources = ("kernels.norm.pallas", "kernels.norm.reference", "kernels._compiler")

    def space(self, problem: NormProblem, chip: Chip) -> Space:
        align, wide = sublanes(problem.dtype), model.width(problem)
        longest = round_up(problem.rows, align)
        fits = chip.vmem_bytes // model.vmem_lower_bound(problem, {"block_rows": 1}, self.kind, self.backward)
        blocks = block_candidates(longest, align, smallest=align, largest=max(fits // align * align, align))
        tiles = {part for block in blocks for part in aligned_divisors(block, align)}
        tiles = {tile for tile in tiles if tile * wide <= LARGEST_CODE} | {align}
        params = [
            Param("block_rows", blocks, "rows fetched per grid step"),
            Param("block_rows_compute", spread(tiles, MANY_TILES), "rows per tile", align),
            Param("unroll", (1, 2, 4), "tiles per pass of the loop over a block's tiles", 1),
            self._parts(chip) if self.backward else self._write_pieces(chip),
            vmem_param(chip),
        ]
        constraints = [
            Constraint(
                f"block_rows must be a positive multiple of {align} up to {longest}",
                lambda config: 0 < config["block_rows"] <= longest and config["block_rows"] % align == 0,
            ),
            Constraint(
                f"block_rows_compute must be a positive multiple of {align}",
                lambda config: config["block_rows_compute"] > 0 and config["block_rows_compute"] % align == 0,
            ),
            Constraint(
                "block_rows_compute must divide block_rows",
                lambda config: config["block_rows"] % config["block_rows_compute"] == 0,
            ),
            Constraint("unroll must be between 1 and 8", lambda config: 1 <= config["unroll"] <= 8),
            Constraint(
                f"unroll x block_rows_compute x {wide} must be at most {LARGEST_CODE} elements, or one tile of {align} "
                "rows: the compiler takes long for more",
                lambda config: (
                    config["unroll"] * config["block_rows_compute"] * wide <= LARGEST_CODE
                    or config["unroll"] * config["block_rows_compute"] == align
                ),
            ),
            *(self._part_constraints(problem) if self.backward else self._piece_constraints(problem, chip)),
            vmem_limit_constraint(chip),
            Constraint(
                "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
                lambda config: (
                    model.vmem_lower_bound(problem, config, self.kind, self.backward) <= config["vmem_limit_mib"] * MIB
                ),
            ),
        ]
        return Space(params, constraints)

    def _parts(self, chip: Chip) -> Param:
        return Param("parts", tuple(sorted({1, chip.cores})), "parts of the rows with sums of their own", 1)

    def _write_pieces(self, chip: Chip) -> Param:
        return Param("write_pieces", (1, 2) if chip.cores == 1 else (1,), "transfers that write a block of results", 1)

    def _piece_constraints(self, problem: NormProblem, chip: Chip) -> list[Constraint]:
        align = sublanes(problem.dtype)
        return [
            Constraint("write_pieces must be between 1 and 8", lambda config: 1 <= config["write_pieces"] <= 8),
            Constraint(
                f"write_pieces over 1 need a chip with one core ({chip.name} has {chip.cores}), a block_rows that "
                f"divides rows={problem.rows}, and pieces of a multiple of {align} rows",
                lambda config: (
                    config["write_pieces"] == 1
                    or (
                        chip.cores == 1
                        and problem.rows % config["block_rows"] == 0
                        and config["block_rows"] % (config["write_pieces"] * align) == 0
                    )
                ),
            ),
        ]

    def _part_constraints(self, problem: NormProblem) -> list[Constraint]:
        return [
            Constraint(
                "parts must be between 1 and the number of blocks",
                lambda config: 1 <= config["parts"] <= cdiv(problem.rows, config["block_rows"]),
            )
        ]

    def arguments(self, problem: NormProblem) -> tuple[ArraySpec, ...]:
        """x, the parameters, then the residual; or the gradients of the normed rows and of the sum."""
        rows = ArraySpec((problem.rows, problem.d), problem.dtype)
        params = [ArraySpec((problem.d,), problem.dtype)] * model.parameters(self.kind)
        return rows, *params, *([rows] * (self.backward + problem.residual))

    def bind(self, problem: NormProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        from kernels.norm.pallas import norm_backward_pallas, norm_pallas

        function = norm_backward_pallas if self.backward else norm_pallas
        return self._bound(function, **config, interpret=interpret)

    def reference(self, problem: NormProblem) -> Callable[..., Any]:
        from kernels.norm.reference import norm_backward_reference, norm_reference

        return self._bound(norm_backward_reference if self.backward else norm_reference)

    def _bound(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`function` of the arrays in `arguments`."""
        count = model.parameters(self.kind)

        def bound(x: jax.Array, *arrays: jax.Array) -> Any:
            params, rest = arrays[:count], arrays[count:]
            return function(x, params, *([rest] if self.backward else rest), kind=self.kind, eps=EPS, **options)

        return bound

    def baselines(self, problem: NormProblem, chip: Chip) -> dict[str, Config]:
        """``default``: the plain kernel, a block at once. (Libraries leave the norms to XLA: the ``xla`` baseline.)"""
        return {"default": self.space(problem, chip).parse(model.plain_config(problem, self.kind, self.backward))}

    def heuristic(self, problem: NormProblem, chip: Chip) -> Config:
        space = self.space(problem, chip)
        config = space.parse(model.heuristic_config(problem, self.kind, self.backward, chip.cores))
        space.check(config)
        return config

    def cost(self, problem: NormProblem) -> Cost:
        return model.cost(problem, self.kind, self.backward)

    def estimate_ms(self, problem: NormProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip, self.kind, self.backward)

    def validation_problems(self, problem: NormProblem, config: Config) -> list[NormProblem]:
        """The problem's own path over a few blocks, dealt out to the parts as evenly; three blocks, the last uneven.

        Writes in pieces want even blocks: three of them and five.
        """
        block, tile, parts = config["block_rows"], config["block_rows_compute"], config.get("parts", 1)
        most = 2 * parts if cdiv(problem.rows, block) % parts == 0 and parts > 1 else 3
        edge = tile + uneven(tile) if 2 * tile <= block else uneven(block)
        other = 2 * block + edge if config.get("write_pieces", 1) == 1 else 5 * block
        rows = [few_blocks(problem.rows, block, most), other]
        return [problem.replace({"rows": count}) for count in dict.fromkeys(rows)]

    def make_inputs(self, problem: NormProblem, seed: int) -> tuple[jax.Array, ...]:
        """Rows of several magnitudes, one of which eps decides, whose means are not zero."""
        import jax.numpy as jnp

        x, *arrays = super().make_inputs(problem, seed)
        scale = jnp.resize(jnp.asarray(SCALES), (problem.rows, 1))
        wide = [(scale * (x.astype(jnp.float32) + 1)).astype(x.dtype)]
        wide += [(scale * a.astype(jnp.float32)).astype(a.dtype) if a.ndim == 2 else a for a in arrays]
        return tuple(wide)


class RMSNormKernel(_NormKernel):
    """Rows by their root mean square: see `kernels.norm`."""

    name = "rmsnorm"
    kind = "rmsnorm"
    summary = "rows over their root mean square, times a weight; with the residual's addition or without"
    problems = RMSNORM_PROBLEMS


class RMSNormBackwardKernel(RMSNormKernel):
    """The gradients of an rmsnorm."""

    name = "rmsnorm_bwd"
    summary = "gradients of rmsnorm: dx, and dweight summed in float32 in VMEM"
    backward = True


class LayerNormKernel(_NormKernel):
    """Rows less their mean, by their standard deviation: see `kernels.norm`."""

    name = "layernorm"
    kind = "layernorm"
    summary = "rows less their mean over their deviation, times a weight, plus a bias; with a residual or without"
    problems = LAYERNORM_PROBLEMS


class LayerNormBackwardKernel(LayerNormKernel):
    """The gradients of a layernorm."""

    name = "layernorm_bwd"
    summary = "gradients of layernorm: dx, and dweight and dbias summed in float32 in VMEM"
    backward = True

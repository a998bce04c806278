"""Cross-entropy's search spaces, and its kernels as the tuner sees them: the losses, and the gradients of x and w."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import MIB, Chip
from autotune.errors import UsageError
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Constraint, Param, Space, aligned_divisors
from kernels._tpu_model import LANES, round_up
from kernels.cross_entropy import cost as model
from kernels.cross_entropy.problem import PROBLEMS, CrossEntropyProblem
from search_spaces._common import (
    block_candidates,
    block_constraint,
    few_blocks,
    spread,
    uneven,
    vmem_limit_constraint,
    vmem_limits,
)

if TYPE_CHECKING:
    import jax

LARGEST_BLOCK = 2048
MANY_TILES = 6
SCALES = (0.5, 1.0, 2.0, 3.0)  # of the logits of the tokens that validation takes
WEIGHTY_Z_LOSS = 0.1  # a smaller one adds less to a loss than validation may overlook
TIGHT_SOFT_CAP = 4.0  # of the logits' own size
SHORT = 256  # a hidden length that is not blocked, as validation takes it


def _options(problem: CrossEntropyProblem) -> dict[str, Any]:
    return {"z_loss": problem.z_loss, "soft_cap": problem.soft_cap, "tied": problem.tied}


def _shape_of_w(problem: CrossEntropyProblem) -> tuple[int, int]:
    return (problem.vocab, problem.hidden) if problem.tied else (problem.hidden, problem.vocab)


class CrossEntropyKernel(Kernel):
    """Losses and log-sum-exps: see `kernels.cross_entropy`.

    Attributes:
        which: The pass: ``forward``, ``dx`` or ``dw``.
        tiled: The block that is computed in parts.
    """

    name = "cross_entropy"
    summary = "softmax cross-entropy of x @ w over a large vocabulary: losses, of logits that never leave VMEM"
    problem_type = CrossEntropyProblem
    problems = PROBLEMS
    relatives: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cross_entropy": {"block_m": "b_block_size", "block_n": "v_block_size", "block_k": "h_block_size"}
    }
    sources = (
        "kernels.cross_entropy.pallas",
        "kernels.cross_entropy.reference",
        "kernels._precision",
        "kernels._compiler",
    )
    which: ClassVar[model.Pass] = "forward"
    tiled: ClassVar[str] = "block_n"

    def space(self, problem: CrossEntropyProblem, chip: Chip) -> Space:
        most = min(LARGEST_BLOCK, chip.vmem_bytes // (problem.hidden * 2) // LANES * LANES or LANES)
        sizes = {"block_m": round_up(problem.tokens, LANES), "block_n": round_up(problem.vocab, LANES)}
        blocks = {name: block_candidates(size, LANES, largest=most) for name, size in sizes.items()}
        parts = {part for block in blocks[self.tiled] for part in aligned_divisors(block, LANES)}
        part, limits = f"{self.tiled}_compute", sorted({*vmem_limits(chip), *self._more_vmem(chip)})
        params = [
            Param("block_m", blocks["block_m"], "tokens per block"),
            Param("block_n", blocks["block_n"], "columns of w per block"),
            *self._depth(problem),
            Param(
                part,
                spread(parts, MANY_TILES),
                f"{'tokens' if self.tiled == 'block_m' else 'columns'} per tile of logits",
                default=lambda config: config[self.tiled],
            ),
            *self._turned(problem),
            Param("held_buffers", (2, 1), f"VMEM buffers of {'w' if self.which == 'dw' else 'x'}, which is held", 2),
            Param(
                "vmem_limit_mib",
                tuple(limits),
                "VMEM the compiler may use for the kernel, MiB (the first is its default)",
                default=chip.scoped_vmem_bytes // MIB,
            ),
        ]
        product = model.largest_product(problem, self.which)
        constraints = [
            *(
                Constraint(
                    f"{name} must be a positive multiple of {LANES} up to {size}",
                    lambda config, name=name, size=size: 0 < config[name] <= size and config[name] % LANES == 0,
                )
                for name, size in sizes.items()
            ),
            *([block_constraint("block_k", "hidden", problem.hidden, LANES)] if self.which == "forward" else []),
            Constraint(
                f"{part} must be a positive multiple of {LANES} that divides {self.tiled}",
                lambda config: (
                    config[part] > 0 and config[part] % LANES == 0 and config[self.tiled] % config[part] == 0
                ),
            ),
            Constraint("held_buffers must be 1 or 2", lambda config: config["held_buffers"] in (1, 2)),
            Constraint(
                f"a step's products must be of at most {product} multiplications, or of 128-wide blocks: the compiler "
                "takes minutes for more",
                lambda config: (
                    model.products(problem, config, self.which) <= product
                    or config["block_m"] == config["block_n"] == LANES
                ),
            ),
            vmem_limit_constraint(chip),
            Constraint(
                "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
                lambda config: model.vmem_lower_bound(problem, config, self.which) <= config["vmem_limit_mib"] * MIB,
            ),
        ]
        return Space(params, constraints)

    def _depth(self, problem: CrossEntropyProblem) -> list[Param]:
        """block_k, where the pass has one."""
        if self.which != "forward":
            return []
        depths = [depth for depth in aligned_divisors(problem.hidden, LANES, smallest=512) if depth != problem.hidden]
        depths = spread({*depths[-2:], min(problem.hidden, LANES), problem.hidden})
        return [Param("block_k", depths, "rows of w per block", default=problem.hidden)]

    def _turned(self, problem: CrossEntropyProblem) -> list[Param]:
        """turned_sum, where there is a choice: the compiler schedules now the one better, now the other."""
        if self.which != "dx" or problem.tied:
            return []
        return [Param("turned_sum", (False, True), "whether the gradient is summed transposed", default=False)]

    def _more_vmem(self, chip: Chip) -> tuple[int, ...]:
        """48 MiB where that is three quarters of the VMEM (v5p, v7x): a block of x and one of w take much."""
        return (48,) if chip.vmem_bytes >= 60 * MIB else ()

    def arguments(self, problem: CrossEntropyProblem) -> tuple[ArraySpec, ...]:
        x = ArraySpec((problem.tokens, problem.hidden), problem.dtype)
        w = ArraySpec(_shape_of_w(problem), problem.dtype)
        statistics = [ArraySpec((problem.tokens,), "float32")] * (0 if self.which == "forward" else 2)
        return x, w, ArraySpec((problem.tokens,), "int32"), *statistics

    def bind(self, problem: CrossEntropyProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        from kernels.cross_entropy import pallas

        return functools.partial(pallas.cross_entropy_pallas, **_options(problem), **config, interpret=interpret)

    def reference(self, problem: CrossEntropyProblem) -> Callable[..., Any]:
        from kernels.cross_entropy import reference

        return functools.partial(reference.cross_entropy_reference, **_options(problem))

    def baselines(self, problem: CrossEntropyProblem, chip: Chip) -> dict[str, Config]:
        return {"default": self.space(problem, chip).parse(model.small_config(problem, self.which))}

    def heuristic(self, problem: CrossEntropyProblem, chip: Chip) -> Config:
        if model.smallest_need(problem, self.which) > chip.vmem_bytes:
            raise UsageError(
                f"{self.name}: blocks of hidden={problem.hidden} in {problem.dtype} leave no room in the "
                f"{chip.vmem_bytes // MIB} MiB of VMEM of {chip.name}: use kernels.cross_entropy."
                "cross_entropy_reference, which XLA compiles, or a narrower dtype or model"
            )
        config = self.space(problem, chip).parse(model.heuristic_config(problem, self.which, self._limit(chip)))
        return {**config, "vmem_limit_mib": min(config["vmem_limit_mib"], chip.vmem_bytes // MIB)}

    def _limit(self, chip: Chip) -> int:
        return max(min(chip.vmem_bytes * 3 // 4, 64 * MIB), chip.scoped_vmem_bytes)

    def cost(self, problem: CrossEntropyProblem) -> Cost:
        return model.cost(problem, self.which)

    def estimate_ms(self, problem: CrossEntropyProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip, self.which)

    def validation_problems(self, problem: CrossEntropyProblem, config: Config) -> list[CrossEntropyProblem]:
        """The problem's own path over a few blocks, and three blocks each way with uneven edges."""
        blocks = {"tokens": config["block_m"], "vocab": config["block_n"]}
        depth = config.get("block_k", problem.hidden)
        fields = {}
        if problem.z_loss:
            fields["z_loss"] = max(problem.z_loss, WEIGHTY_Z_LOSS)
        if problem.soft_cap:
            fields["soft_cap"] = min(problem.soft_cap, TIGHT_SOFT_CAP)
        if depth < problem.hidden:
            blocks["hidden"] = depth
        elif problem.hidden > SHORT:
            fields["hidden"] = SHORT + problem.hidden % LANES
        own = {field: few_blocks(getattr(problem, field), block) for field, block in blocks.items()}
        three = {field: 2 * block + uneven(block) for field, block in blocks.items()}
        return [problem.replace({**fields, **lengths}) for lengths in (own, three)]

    def make_inputs(self, problem: CrossEntropyProblem, seed: int) -> tuple[jax.Array, ...]:
        """Logits of several sizes; among the labels ignored ones, the vocabulary's ends, and many near its end."""
        import jax
        import jax.numpy as jnp

        from kernels.cross_entropy.reference import cross_entropy_reference

        tokens, vocab = problem.tokens, problem.vocab
        keys = jax.random.split(jax.random.key(seed), 5)
        scale = jnp.resize(jnp.asarray(SCALES), (tokens, 1))
        x = (jax.random.normal(keys[0], (tokens, problem.hidden)) * scale).astype(problem.dtype)
        w = (jax.random.normal(keys[1], _shape_of_w(problem)) * problem.hidden**-0.5).astype(problem.dtype)
        number = jnp.arange(tokens)
        labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
        late = vocab - 1 - jax.random.randint(keys[3], (tokens,), 0, min(vocab, LANES))
        labels = jnp.where(number % 5 == 1, late, labels)
        labels = jnp.select([number % 7 == 3, number % 64 == 9, number % 64 == 20], [-1, 0, vocab - 1], labels)
        if self.which == "forward":
            return x, w, labels
        wide = x.astype(jnp.float32), w.astype(jnp.float32)
        lse = jax.jit(functools.partial(cross_entropy_reference, **_options(problem)))(*wide, labels)[1]
        return x, w, labels, lse, jax.random.normal(keys[4], (tokens,))


class _GradientKernel(CrossEntropyKernel):
    """What both gradients have in common."""

    relatives = {}  # Others have their blocks in one table, with one set for both.
    sources = (*CrossEntropyKernel.sources, "kernels.cross_entropy.backward")

    def bind(self, problem: CrossEntropyProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        from kernels.cross_entropy import backward

        function = getattr(backward, f"cross_entropy_{self.which}_pallas")
        return functools.partial(function, **_options(problem), **config, interpret=interpret)

    def reference(self, problem: CrossEntropyProblem) -> Callable[..., Any]:
        from kernels.cross_entropy import reference

        function = getattr(reference, f"cross_entropy_{self.which}_reference")
        return functools.partial(function, **_options(problem))


class CrossEntropyDxKernel(_GradientKernel):
    """The gradient of x: see `kernels.cross_entropy.backward`."""

    name = "cross_entropy_dx"
    summary = "cross-entropy's gradient of x: logits computed again, tile by tile"
    which = "dx"


class CrossEntropyDwKernel(_GradientKernel):
    """The gradient of w: see `kernels.cross_entropy.backward`."""

    name = "cross_entropy_dw"
    summary = "cross-entropy's gradient of w: logits computed again, tile by tile, transposed"
    which = "dw"
    tiled = "block_m"

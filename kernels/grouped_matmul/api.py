"""The grouped matmul for training code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, run, varying_alike
from kernels.grouped_matmul.cost import heuristic_config
from kernels.grouped_matmul.drhs import grouped_matmul_drhs_pallas
from kernels.grouped_matmul.pallas import grouped_matmul_pallas
from kernels.grouped_matmul.problem import GroupedMatmulProblem, GroupedProblem
from kernels.grouped_matmul.reference import grouped_matmul_drhs_reference, grouped_matmul_reference


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    config: Config | None = None,
    dlhs_config: Config | None = None,
    drhs_config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``out[i] = lhs[i] @ rhs[group of i]`` by the tuned kernel on a TPU, by XLA's ragged dot elsewhere.

    Differentiable: both gradients are tuned kernels', too. That of lhs is the same kernel with rhs the other way round.
    Under `jax.vmap` it runs once for each of the batch.

    Args:
        lhs: ``[m, k]``, bfloat16 or float32: first the rows of group 0, then those of group 1 and so on.
        rhs: ``[groups, k, n]`` of lhs' dtype, or ``[groups, n, k]`` with transpose_rhs.
        group_sizes: ``[groups]``, int32: rows of each group, zeros allowed, m in all or fewer. Rows past their sum have
            no group: their result is zeros, and so is their gradient.
        transpose_rhs: Whether each right-hand side is used transposed (it is not copied for that).
        config: Block sizes and the like (`grouped_matmul_pallas` lists them); None takes the preset for these shapes
            on this device, and a heuristic where there is none.
        dlhs_config: The same of the gradient of lhs.
        drhs_config: The same of the gradient of rhs (`grouped_matmul_drhs_pallas` lists them).
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        ``[m, n]`` in lhs' dtype; sums are float32.

    Raises:
        UsageError: Shapes or dtypes do not fit together.
    """
    right = "[groups, n, k]" if transpose_rhs else "[groups, k, n]"
    fits = lhs.ndim == 2 and rhs.ndim == 3 and lhs.shape[1] == rhs.shape[2 if transpose_rhs else 1]
    if not fits or group_sizes.shape != rhs.shape[:1]:
        shapes = f"lhs {lhs.shape}, rhs {rhs.shape}, group_sizes {group_sizes.shape}"
        raise UsageError(f"grouped_matmul of {shapes}: must be [m, k], {right} and [groups]")
    if lhs.dtype != rhs.dtype:
        raise UsageError(
            f"grouped_matmul of {lhs.dtype} and {rhs.dtype}: must both be {one_of(GroupedMatmulProblem.dtypes)}"
        )
    if group_sizes.dtype != jnp.int32:
        raise UsageError(f"grouped_matmul with group_sizes of {group_sizes.dtype}: must be int32")
    (m, k), n = lhs.shape, rhs.shape[1 if transpose_rhs else 2]
    sizes = {"m": m, "n": n, "k": k, "groups": rhs.shape[0], "dtype": str(lhs.dtype)}

    def one_by_one(kernel: Callable[..., jax.Array], reference: Callable[..., jax.Array], *arrays: jax.Array):
        """Under vmap a loop: neither Pallas' dynamic grids nor ragged dots take every axis that may be batched."""
        return jax.custom_batching.sequential_vmap(functools.partial(run, kernel, reference, interpret))(*arrays)

    def product(x: jax.Array, y: jax.Array, group_sizes: jax.Array, config: Config | None, **fields: Any) -> jax.Array:
        problem = GroupedMatmulProblem(**{**sizes, **fields})
        chosen = choose_config("grouped_matmul", problem, config, lambda: heuristic_config(problem))
        option = {"transpose_rhs": problem.transpose_rhs}
        kernel = functools.partial(grouped_matmul_pallas, **option, **chosen, interpret=interpret)
        return one_by_one(kernel, functools.partial(grouped_matmul_reference, **option), x, y, group_sizes)

    def weights(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
        problem = GroupedProblem(**{**sizes, "k": lhs.shape[1], "n": grad.shape[1]})
        chosen = choose_config(
            "grouped_matmul_drhs", problem, drhs_config, lambda: heuristic_config(problem, drhs=True)
        )
        kernel = functools.partial(grouped_matmul_drhs_pallas, **chosen, interpret=interpret)
        return one_by_one(kernel, grouped_matmul_drhs_reference, lhs, grad, group_sizes)

    @jax.custom_vjp
    def op(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return product(lhs, rhs, group_sizes, config, transpose_rhs=transpose_rhs)

    def backward(saved: tuple[jax.Array, jax.Array, jax.Array], grad: jax.Array):
        lhs, rhs, group_sizes = saved
        dlhs = product(grad, rhs, group_sizes, dlhs_config, n=k, k=n, transpose_rhs=not transpose_rhs)
        drhs = weights(grad, lhs, group_sizes) if transpose_rhs else weights(lhs, grad, group_sizes)
        return dlhs, drhs, None

    op.defvjp(lambda *arrays: (op(*arrays), arrays), backward)
    return op(*varying_alike((lhs, rhs, group_sizes)))

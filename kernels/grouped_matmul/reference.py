"""The grouped matmul and its gradients in plain JAX: the numerics to match, and XLA's ``xla`` baseline.

XLA has an operation of its own for these (and, on TPUs, a kernel); elsewhere it multiplies all rows by all groups.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels._precision import dot, dot_precision

_BY_ROW = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_BY_ROW_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def grouped_matmul_reference(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool = False
) -> jax.Array:
    """``out[i] = lhs[i] @ rhs[group of i]``, ``[m, n]`` in lhs' dtype, zeros where a row has no group.

    Args:
        lhs: ``[m, k]``, its rows sorted by group.
        rhs: ``[groups, k, n]``, or ``[groups, n, k]`` with transpose_rhs.
        group_sizes: ``[groups]``, integers.
        transpose_rhs: Whether each right-hand side is used transposed.
    """
    return _ragged(lhs, rhs, group_sizes, _BY_ROW_TRANSPOSED if transpose_rhs else _BY_ROW)


def grouped_matmul_drhs_reference(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """``out[g] = lhs[rows of g]ᵀ @ grad[rows of g]``, ``[groups, k, n]`` in lhs' dtype, zeros for groups without rows.

    Args:
        lhs: ``[m, k]``, its rows sorted by group.
        grad: ``[m, n]``, of lhs' dtype.
        group_sizes: ``[groups]``, integers.
    """
    return _ragged(lhs, grad, group_sizes, _OVER_ROWS)


def _ragged(x: jax.Array, y: jax.Array, group_sizes: jax.Array, dimensions: jax.lax.RaggedDotDimensionNumbers):
    return jax.lax.ragged_dot_general(
        x,
        y,
        group_sizes.astype(jnp.int32),
        dimensions,
        precision=dot_precision(x.dtype),
        preferred_element_type=x.dtype,  # the sums are float32 all the same, and no pass rounds them afterwards
    )


def plain_grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool = False
) -> jax.Array:
    """`grouped_matmul_reference` one group after the other: off TPUs it takes less memory."""

    def add(group: jax.Array, out: jax.Array) -> jax.Array:
        matrix = rhs[group].T if transpose_rhs else rhs[group]
        return out + jnp.where(_rows(lhs, group_sizes, group), dot(lhs, matrix), 0.0)

    n = rhs.shape[1 if transpose_rhs else 2]
    return _over_groups(add, group_sizes, jnp.zeros((lhs.shape[0], n))).astype(lhs.dtype)


def plain_drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_matmul_drhs_reference` one group after the other."""

    def add(group: jax.Array, out: jax.Array) -> jax.Array:
        rows = _rows(lhs, group_sizes, group)
        return out.at[group].set(dot(jnp.where(rows, lhs, 0.0).T, jnp.where(rows, grad, 0.0)))

    shape = (group_sizes.shape[0], lhs.shape[1], grad.shape[1])
    return _over_groups(add, group_sizes, jnp.zeros(shape)).astype(lhs.dtype)


def _rows(lhs: jax.Array, group_sizes: jax.Array, group: jax.Array) -> jax.Array:
    """``[m, 1]``: which rows are the group's."""
    end = jnp.cumsum(group_sizes)[group]
    row = jnp.arange(lhs.shape[0])[:, None]
    return (row >= end - group_sizes[group]) & (row < end)


def _over_groups(add: Callable[[jax.Array, jax.Array], jax.Array], group_sizes: jax.Array, out: jax.Array) -> jax.Array:
    """`add` for each group that has rows."""

    def step(group: jax.Array, out: jax.Array) -> jax.Array:
        return jax.lax.cond(group_sizes[group] > 0, add, lambda _, out: out, group, out)

    return jax.lax.fori_loop(0, group_sizes.shape[0], step, out)

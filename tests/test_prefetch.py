"""Values that steer Pallas kernels, found in a program's jaxpr."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.engines.compiler.prefetch import steered_calls
from autotune.engines.compiler.schedule.steering import PallasCall, known_operands
from autotune.kernel import ArraySpec

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
SIZES = jax.ShapeDtypeStruct((4,), jnp.int32)


def kernel(table, x):
    """Copies blocks of 8 rows in the order of `table`."""
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(table.shape[0],),
        in_specs=[pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, table: (i, 0)),
    )

    def body(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    return pl.pallas_call(body, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((8 * table.shape[0], 128), x.dtype))(
        table, x
    )


def found(function, arguments, examples=None):
    traced = jax.jit(function).trace(*arguments)
    return [call.steering for call in steered_calls(traced.jaxpr, examples or [None] * len(arguments))]


def test_constants_and_what_follows_from_them():
    def function(x):
        table = jax.jit(lambda n: jnp.cumsum(jnp.full((4,), n)))(2)
        return kernel(np.array([3, 1], np.int32), x)[:, :1] + kernel(table, x)[:16, :1]

    first, second = found(function, [X])
    np.testing.assert_array_equal(first[0], [3, 1])
    np.testing.assert_array_equal(second[0], [2, 4, 6, 8])


def test_arguments_with_an_example_and_without():
    def function(sizes, x):
        return kernel(sizes * 2, x)

    assert found(function, [SIZES, X]) == [{}]
    (steering,) = found(function, [SIZES, X], [np.array([0, 1, 2, 3], np.int32), None])
    np.testing.assert_array_equal(steering[0], [0, 2, 4, 6])


def test_what_depends_on_data_is_left_unknown():
    assert found(lambda x: kernel(x[0, :4].astype(jnp.int32), x), [X]) == [{}]


@pytest.mark.parametrize("wrapped", ["vmap", "custom_vjp", "custom_vmap", "remat", "cond", "scan"])
def test_calls_inside_of_others(wrapped):
    table = jnp.arange(4, dtype=jnp.int32)

    def plain(x):
        return kernel(table + 1, x)

    if wrapped == "vmap":
        function, x = jax.vmap(plain), jax.ShapeDtypeStruct((2, *X.shape), X.dtype)
    elif wrapped == "custom_vjp":
        function, x = jax.custom_vjp(plain), X
        function.defvjp(lambda x: (plain(x), None), lambda _, g: (g,))
    elif wrapped == "custom_vmap":
        function, x = jax.custom_batching.custom_vmap(plain), X
        function.def_vmap(lambda size, batched, x: (plain(x), batched[0]))
    elif wrapped == "remat":
        function, x = jax.checkpoint(plain), X
    elif wrapped == "cond":
        function, x = (lambda x: jax.lax.cond(x[0, 0] > 0, plain, lambda x: x[:32], x)), X
    else:
        function, x = (lambda x: jax.lax.scan(lambda carry, _: (plain(carry), None), x[:32], length=3)[0]), X
    (steering,) = found(function, [x])
    np.testing.assert_array_equal(steering[0].reshape(-1)[:4], [1, 2, 3, 4])


def test_a_loop_that_changes_the_table_leaves_it_unknown():
    def function(x):
        def step(carry, _):
            table, x = carry
            return (table + 1, kernel(table, x)), None

        return jax.lax.scan(step, (jnp.arange(4, dtype=jnp.int32), x[:32]), length=3)[0]

    assert found(function, [X]) == [{}]


def test_a_loop_is_not_one_pass_of_its_body():
    def count(n, table):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + 1), (0, table))[1]

    (steering,) = found(lambda x: kernel(count(3, jnp.zeros(4, jnp.int32)), x), [X])
    np.testing.assert_array_equal(steering[0], [3, 3, 3, 3])
    n = jax.ShapeDtypeStruct((), jnp.int32)
    assert found(lambda n, x: kernel(count(n, jnp.zeros(4, jnp.int32)), x), [n, X]) == [{}]
    looped = jax.ShapeDtypeStruct((32, 128), jnp.float32)

    def carried(n, x):
        step = lambda i, c: (c[0] + 1, kernel(c[0], c[1]))  # noqa: E731
        return jax.lax.fori_loop(0, n, step, (jnp.zeros(4, jnp.int32), x))[1]

    assert found(carried, [n, looped]) == [{}]


def test_state_and_callbacks_leave_it_unknown():
    def stateful(x):
        ref = jax.new_ref(jnp.zeros(4, jnp.int32))
        ref[...] = x[0, :4].astype(jnp.int32)
        return kernel(ref[...], x)

    def called_back(x):
        return kernel(jax.pure_callback(lambda: np.ones(4, np.int32), jax.ShapeDtypeStruct((4,), jnp.int32)), x)

    assert found(called_back, [X]) == [{}]
    if hasattr(jax, "new_ref"):
        assert found(stateful, [X]) == [{}]


def test_an_example_must_fit_its_argument():
    with pytest.raises(ValueError, match="example must be"):
        ArraySpec((4,), "int32", example=np.zeros(4, np.int8))


def test_programs_without_such_kernels_cost_nothing():
    assert found(lambda x: x + 1, [X]) == []


def test_sizes_of_a_ragged_dot():
    arguments = [X, jax.ShapeDtypeStruct((4, 128, 128), jnp.float32), SIZES]
    sizes = np.array([9, 0, 40, 3], np.int32)
    (steering,) = found(jax.lax.ragged_dot, arguments, [None, None, sizes])
    np.testing.assert_array_equal(steering[0], sizes)
    assert found(jax.lax.ragged_dot, arguments) == [{}]


def test_xla_s_tables_of_a_ragged_dot():
    """Tiles of 16 rows: the groups' rows are 0 to 9, 9 to 49 and 49 to 52."""
    types = ["s32[1]{0}", "s32[5]{0}", "s32[7]{0}", "s32[7]{0}", "s32[1]{0}", "f32[64,8]{1,0}", "f32[4,8,8]{2,1,0}"]
    lines = [f"  %p.{number} = {text} parameter({number})" for number, text in enumerate(types)]
    names = ", ".join(f"%p.{number}" for number in range(7))
    lines.append(f'  %ragged-dot-none = f32[64,8]{{1,0}} custom-call({names}), custom_call_target="tpu_custom_call"')

    def known(*calls):
        steered = [PallasCall((((4,), "int32"),), {} if sizes is None else {0: np.int32(sizes)}) for sizes in calls]
        return known_operands("\n".join(lines), steered)

    right = [(6,), (0, 9, 9, 49, 52), (0, 2, 2, 2, 2, 3, 0), (0, 0, 1, 2, 3, 3, 0), (6,)]
    for calls in ([9, 0, 40, 3],), ([9, 0, 40, 3], [9, 0, 40, 3]):
        operands = known(*calls)["ragged-dot-none"]
        assert [operands.arrays[number] for number in range(5)] == right
    # More rows than there are.
    operands = known([9, 0, 40, 30])["ragged-dot-none"]
    assert operands.arrays[1] == (0, 9, 9, 49, 64)
    # Which of several ragged dots it is cannot be known.
    for calls in ([9, 0, 40, 3], [9, 0, 40, 4]), ([9, 0, 40, 3], None), (None,):
        assert "ragged-dot-none" not in (found := known(*calls)) or not found["ragged-dot-none"].arrays


def test_a_grid_that_is_a_value():
    def function(sizes, x):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(jnp.sum(sizes),),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x)

    (steering,) = found(function, [SIZES, X], [np.array([1, 2, 0, 1], np.int32), None])
    assert steering[0] == 4

"""Flax layers on the kernels: equal to Flax's own, forward and backward, on the reference path and interpreted."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.experimental.pallas import tpu as pltpu

from autotune.engines.compiler.support import why_unsupported, worker_environment
from autotune.errors import UsageError
from kernels.flax_layers import Segments, attention_fn
from kernels.flax_layers import linen as tuned_linen
from kernels.flax_layers import nnx as tuned_nnx
from kernels.norm import rmsnorm
from kernels.requests import requested

WIDTH = 32
INTERPRETED = pltpu.InterpretParams()


def rows(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    """Random numbers whose mean is not zero."""
    return (jax.random.normal(jax.random.key(seed), shape) + 0.3).astype(dtype)


def close(got, want, tolerance=2e-5):
    """Trees of the same structure, shapes and dtypes; their numbers, too, relative to the largest."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        np.testing.assert_allclose(one, other, atol=tolerance * (np.abs(other).max() + 1), rtol=0)


def nnx_results(layer: nnx.Module, state: nnx.State, *arrays: jax.Array, **options):
    """What an NNX layer with these parameters gives, and the gradients of parameters and arrays."""
    graph = nnx.graphdef(layer)

    @jax.jit
    def run(state, arrays):
        out, pull = jax.vjp(lambda state, arrays: nnx.merge(graph, state)(*arrays, **options), state, arrays)
        return out, pull(jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), out))

    return run(state, arrays)


def linen_results(layer: linen.Module, variables, *arrays: jax.Array, **options):
    """The same of a Linen layer."""

    @jax.jit
    def run(variables, arrays):
        out, pull = jax.vjp(lambda variables, arrays: layer.apply(variables, *arrays, **options), variables, arrays)
        return out, pull(jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), out))

    return run(variables, arrays)


def heads(function=nnx.dot_product_attention, **options) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        4, WIDTH, attention_fn=function, decode=False, rngs=nnx.Rngs(0), **{"num_kv_heads": 2, **options}
    )


def test_nnx_attention_equals_flaxs_by_the_kernels_themselves():
    """In Pallas' interpreter."""
    x, theirs = rows(2, 24, WIDTH), heads()
    ours, state = heads(attention_fn(causal=True, interpret=INTERPRETED)), nnx.state(theirs)
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(state)
    close(nnx_results(ours, state, x), nnx_results(theirs, state, x, is_causal=True))


def test_linen_attention_equals_flaxs_under_a_causal_mask():
    x = rows(2, 24, WIDTH)
    theirs = linen.MultiHeadDotProductAttention(num_heads=4)
    ours = theirs.clone(attention_fn=attention_fn(causal=True))
    variables = theirs.init(jax.random.key(0), x)
    mask = linen.make_causal_mask(x[..., 0])
    close(linen_results(ours, variables, x), linen_results(theirs, variables, x, mask=mask))


@pytest.mark.slow
def test_any_number_of_batch_dimensions_will_do():
    q, k = rows(6, 16, 4, 8), rows(6, 16, 2, 8, seed=1)

    @jax.jit
    def both(q, k):
        deep = [array.reshape(2, 3, *array.shape[1:]) for array in (q, k, k)]
        function = attention_fn()
        return (function(*deep, is_causal=True).reshape(q.shape), function(q[0], k[0], k[0], is_causal=True)), (
            want := nnx.dot_product_attention(q, k, k, is_causal=True),
            want[0],
        )

    close(*both(q, k))


@pytest.mark.slow
def test_padding_and_packing_equal_masks():
    """A mask of keys and `Segments` are taken as masks are by Flax; fewer queries than keys."""
    q, k, v = rows(3, 16, 4, 8), rows(3, 20, 2, 8, seed=1), rows(3, 20, 2, 8, seed=2)
    keys = (jnp.arange(20) < jnp.array([20, 7, 1])[:, None])[:, None, None]
    ids = jnp.arange(16) // jnp.array([4, 5, 16])[:, None]

    @jax.jit
    def both(q, k, v, keys, ids):
        one, theirs = keys[1:2], nnx.dot_product_attention
        ours = [attention_fn()(q, k, v, mask=keys), attention_fn()(q, k, v, mask=one)]
        want = [theirs(q, k, v, mask=keys), theirs(q, k, v, mask=jnp.broadcast_to(one, keys.shape))]
        k, v = k[:, :16], v[:, :16]
        ours += [attention_fn(causal=True)(q, k, v, mask=mask) for mask in (Segments(ids), Segments(ids, ids))]
        mask = nnx.combine_masks(nnx.make_causal_mask(ids), nnx.make_attention_mask(ids, ids, jnp.equal))
        return ours, want + [theirs(q, k, v, mask=mask)] * 2

    close(*both(q, k, v, keys, ids))


def test_values_may_be_of_another_width():
    q, k, v = rows(3, 16, 4, 8), rows(3, 16, 4, 8, seed=1), rows(3, 16, 4, 24, seed=2)
    close(attention_fn()(q, k, v), linen.dot_product_attention(q, k, v))


def test_a_layer_that_decodes_gives_what_it_gives_to_the_whole_sequence():
    x = rows(2, 6, WIDTH)
    layer = heads(attention_fn(causal=True))
    whole = layer(x)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    close(jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(6)], axis=1), whole)


def test_attention_computes_in_the_dtype_that_it_is_given_else_in_the_widest():
    q, k = rows(16, 4, 8), rows(16, 4, 8, seed=1)
    narrow = [array.astype(jnp.bfloat16) for array in (q, k)]
    function = attention_fn()
    close(function(q, k, k, dtype=jnp.bfloat16), function(narrow[0], narrow[1], narrow[1]))
    assert function(narrow[0], k, k).dtype == jnp.float32


Q = rows(2, 16, 4, 8)
CAUSAL_MASK = nnx.make_causal_mask(jnp.ones((2, 16)))


@pytest.mark.parametrize(
    ("function", "options", "right"),
    [
        (attention_fn(), {"mask": CAUSAL_MASK}, r"attention_fn\(causal=True\).*\(2, 1, 1, 16\)"),
        (attention_fn(), {"mask": jnp.ones((2, 4, 1, 16))}, "Segments"),
        (attention_fn(), {"mask": Segments(jnp.ones((2, 15), int))}, r"must be \(2, 16\) for the queries"),
        (attention_fn(), {"bias": jnp.zeros((2, 1, 16, 16))}, "Flax's own dot_product_attention"),
        (attention_fn(), {"dropout_rate": 0.1}, "give dropout_rate=0 or deterministic=True"),
        (attention_fn(), {"module": object()}, "sow_weights=True: .* leave it out"),
        (attention_fn(), {"qk_attn_weights_einsum": jnp.einsum}, "an einsum of its own"),
        (attention_fn(), {"is_causal": True, "key": Q[:, :9], "value": Q[:, :9]}, r"attention_fn\(causal=True\)"),
        (attention_fn(window=4), {}, "needs causal=true"),
        (attention_fn(), {"value": Q[:1]}, "with the same batch"),
        (attention_fn(), {"dtype": jnp.float16}, "bfloat16 or float32"),
        (
            attention_fn(causal=True, window=4),
            {"query": Q[:, :1], "mask": jnp.ones((2, 1, 1, 16))},
            "leave the window out",
        ),
    ],
)  # fmt: skip
def test_what_the_attention_kernel_cannot_do_is_refused_with_what_would_be_right(function, options, right):
    with pytest.raises(UsageError, match=right):
        function(**{"query": Q, "key": Q, "value": Q, **options})


def test_dropout_that_is_off_is_none():
    close(attention_fn()(Q, Q, Q, dropout_rate=0.5, deterministic=True), attention_fn()(Q, Q, Q))


@pytest.mark.parametrize(
    ("name", "options", "interpret"),
    [
        ("LayerNorm", {"dtype": jnp.bfloat16}, False),
        ("LayerNorm", {"use_scale": False, "use_bias": False}, False),
        ("RMSNorm", {"dtype": jnp.bfloat16}, INTERPRETED),
    ],
    ids=["layer-bfloat16", "layer-without", "rms-bfloat16-interpreted"],
)
def test_norms_equal_flaxs_with_flaxs_parameters(name, options, interpret):
    x = rows(3, 5, WIDTH)
    tolerance = 2**-6 if "dtype" in options else 2e-5
    options = {"epsilon": 1e-3, **options}
    theirs = getattr(nnx, name)(WIDTH, rngs=nnx.Rngs(0), **options)
    ours = getattr(tuned_nnx, name)(WIDTH, rngs=nnx.Rngs(0), interpret=interpret, **options)
    state = jax.tree.map(lambda param: rows(*param.shape, seed=3), nnx.state(theirs))
    want = nnx_results(theirs, state, x)
    close(nnx_results(ours, state, x), want, tolerance)

    layer = getattr(tuned_linen, name)(interpret=interpret, **options)
    variables = layer.init(jax.random.key(0), x)
    close(variables, getattr(linen, name)(**options).init(jax.random.key(0), x))
    variables = jax.tree.map(lambda param: rows(*param.shape, seed=3), variables)
    got = linen_results(layer, variables, x)
    close((got[0], got[1][1]), (want[0], want[1][1]), tolerance)
    close(got[1][0].get("params", {}), nnx.to_pure_dict(want[1][0]), tolerance)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_promote_as_flaxs_do(name):
    """bfloat16 rows under float32 parameters give float32, unless the layer has a dtype."""
    x = rows(4, WIDTH, dtype="bfloat16")
    for given in ({}, {"dtype": jnp.bfloat16}):
        ours, theirs = (getattr(module, name)(WIDTH, rngs=nnx.Rngs(0), **given) for module in (tuned_nnx, nnx))
        close(ours(x), theirs(x), 2**-7)
        ours, theirs = (getattr(module, name)(**given) for module in (tuned_linen, linen))
        close(*(layer.apply(theirs.init(jax.random.key(0), x), x) for layer in (ours, theirs)), 2**-7)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_residual_is_added_before_the_norm(name):
    x, residual = rows(4, WIDTH), rows(4, WIDTH, seed=1)
    want = (getattr(nnx, name)(WIDTH, rngs=nnx.Rngs(0))(x + residual), x + residual)
    close(getattr(tuned_nnx, name)(WIDTH, rngs=nnx.Rngs(0))(x, residual=residual), want)
    layer = getattr(tuned_linen, name)()
    close(layer.apply(layer.init(jax.random.key(0), x), x, residual=residual), want)


def test_norms_refuse_what_the_kernels_do_not():
    x, mask = rows(4, WIDTH), jnp.ones((4, WIDTH), bool)
    for name in ("RMSNorm", "LayerNorm"):
        for options in ({"reduction_axes": 0}, {"feature_axes": (0, 1)}, {"axis_name": "data"}):
            with pytest.raises(UsageError, match=f"use flax's own {name}"):
                getattr(tuned_nnx, name)(WIDTH, rngs=nnx.Rngs(0), **options)
            with pytest.raises(UsageError, match=f"use flax's own {name}"):
                getattr(tuned_linen, name)(**options).init(jax.random.key(0), x)
        with pytest.raises(UsageError, match="takes none"):
            getattr(tuned_nnx, name)(WIDTH, rngs=nnx.Rngs(0))(x, mask=mask)
        with pytest.raises(UsageError, match="force_float32_reductions"):
            getattr(tuned_linen, name)(force_float32_reductions=False).init(jax.random.key(0), x)


class PlainMLP(nnx.Module):
    """What `GatedMLP` is, of Flax's own layers."""

    def __init__(self, activation: str, dtype):
        options = {"use_bias": False, "rngs": nnx.Rngs(0), "dtype": dtype}
        self.activation = activation
        self.gate_proj, self.up_proj = nnx.Linear(WIDTH, 48, **options), nnx.Linear(WIDTH, 48, **options)
        self.down_proj = nnx.Linear(48, WIDTH, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(getattr(jax.nn, self.activation)(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("activation", "dtype", "interpret"),
    [("gelu", None, False), ("silu", jnp.bfloat16, INTERPRETED)],
    ids=["gelu", "silu-bfloat16-interpreted"],
)
def test_gated_mlp_equals_flaxs_linear_layers(activation, dtype, interpret):
    x, plain = rows(2, 9, WIDTH), PlainMLP(activation, dtype)
    tolerance = 2**-6 if dtype else 2e-5
    options = {"activation": activation, "dtype": dtype, "interpret": interpret}
    ours = tuned_nnx.GatedMLP(WIDTH, 48, rngs=nnx.Rngs(1), **options)
    want = nnx_results(plain, state := nnx.state(plain), x)
    close(nnx_results(ours, state, x), want, tolerance)

    layer = tuned_linen.GatedMLP(48, **options)
    variables = {"params": nnx.to_pure_dict(state)}
    assert jax.tree.map(jnp.shape, layer.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, variables)
    out, (gradients, (dx,)) = linen_results(layer, variables, x)
    want_out, (want_gradients, (want_dx,)) = want
    close((out, gradients["params"], dx), (want_out, nnx.to_pure_dict(want_gradients), want_dx), tolerance)


def test_what_is_asked_of_the_tuner_is_collected_while_tracing():
    """Each instance once, forward and backward; what has a config of its caller's asks for nothing."""
    first, second = (tuned_nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0)) for _ in "ab")

    def loss(x):
        return attention_fn(causal=True)(*[second(first(x)).reshape(2, 8, 4, 8)] * 3).sum()

    with requested() as asked:
        jax.eval_shape(jax.grad(loss), rows(2, 8, WIDTH))
    assert [request.kernel for request in asked] == ["rmsnorm", "attention", "attention_bwd", "rmsnorm_bwd"]
    assert str(next(iter(asked)).problem) == f"rows=16,d={WIDTH},dtype=float32"
    with requested() as asked:
        config = {"block_rows": 16, "block_rows_compute": 16, "unroll": 1}
        jax.eval_shape(functools.partial(rmsnorm, config=config), Q, Q[0, 0, 0])
    assert not asked


@pytest.mark.skipif(why_unsupported() is not None, reason="no TPU compiler here")
def test_a_block_of_these_layers_compiles_for_v5e_forward_and_backward():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, **worker_environment(), "LIBTPU_INIT_ARGS": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 7, "attention, two norms and the MLP, and their gradients, are Mosaic kernels"


COMPILE = """
import jax, jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from kernels.flax_layers import attention_fn
from kernels.flax_layers.nnx import GatedMLP, LayerNorm, RMSNorm

class Block(nnx.Module):
    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.first, self.second = RMSNorm(256, **options), LayerNorm(256, **options)
        function = attention_fn(causal=True)
        self.attention = nnx.MultiHeadAttention(
            2, 256, num_kv_heads=1, attention_fn=function, decode=False, **options)
        self.mlp = GatedMLP(256, 512, **options)

    def __call__(self, x):
        normed, x = self.second(self.attention(self.first(x)), residual=x)
        return x + self.mlp(normed)

graph, state = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
mesh = jax.sharding.Mesh([device], ("x",))
here = NamedSharding(mesh, PartitionSpec())
place = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)
x = jax.ShapeDtypeStruct((1, 256, 256), jnp.bfloat16)

def loss(state, x):
    return nnx.merge(graph, state)(x).astype(jnp.float32).sum()

compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(place(state), place(x)).compile()
print(compiled.as_text().count('custom_call_target="tpu_custom_call"'))
"""

"""The public functions on several devices: inside `jax.shard_map`, differentiated inside and outside of it."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import functools, sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from jax.experimental.pallas import tpu as pltpu
from kernels.cross_entropy import cross_entropy
from kernels.gated_mlp import gated_mlp
from kernels.matmul import matmul

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
keys = jax.random.split(jax.random.key(0), 3)
x, w = jax.random.normal(keys[0], (64, 32)), jax.random.normal(keys[1], (32, 48))
labels = jax.random.randint(keys[2], (64,), -1, 48)
PAIR = {"block_m": 128, "block_n": 128}
TILE = {**PAIR, "block_k": 128}

def configured(function, interpret, **configs):
    return functools.partial(function, interpret=interpret, **configs) if interpret else function

def losses(interpret):
    mul = configured(matmul, interpret, config=TILE, dx_config=TILE, dy_config=TILE)
    mlp = configured(gated_mlp, interpret, config=TILE, bwd_config=TILE, dx_config=TILE, dw_config=TILE)
    cross = configured(cross_entropy, interpret, config=PAIR, dx_config=PAIR, dw_config=PAIR)
    yield lambda x, w, labels: jnp.sin(mul(x, w, activation="silu")).sum()
    yield lambda x, w, labels: mlp(x, w, 2 * w).sum()
    yield lambda x, w, labels: cross(x, w, labels, ignore_index=-1).sum()

interpret = pltpu.InterpretParams() if sys.argv[1] == "kernels" else False
for loss in losses(interpret):
    shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=False, in_specs=(P("data"), P(), P("data")))

    @functools.partial(shard, out_specs=(P("data"), P()))
    def inside(x, w, labels):
        dx, dw = jax.grad(loss, (0, 1))(x, w, labels)
        return dx, jax.lax.psum(dw, "data")

    @functools.partial(shard, out_specs=P())
    def summed(x, w, labels):
        return jax.lax.psum(loss(x, w, labels), "data")

    want = jax.grad(loss, (0, 1))(x, w, labels)
    for found in (inside, jax.grad(summed, (0, 1))):
        for got, right in zip(jax.jit(found)(x, w, labels), want, strict=True):
            assert jnp.linalg.norm(got - right) < 1e-5 * jnp.linalg.norm(right), (interpret, loss)
"""


@pytest.mark.parametrize("by", ["xla", pytest.param("kernels", marks=pytest.mark.slow)])
def test_shards_have_the_gradients_of_the_whole(by):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, by], env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert run.returncode == 0, run.stderr[-2000:]

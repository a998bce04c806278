"""The public functions inside `shard_map`, its checks on as by default."""

import json
import os
import subprocess
import sys

import pytest

SHARDED = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from kernels.attention import attention
from kernels.cross_entropy import cross_entropy
from kernels.gated_mlp import gated_mlp
from kernels.grouped_matmul import grouped_matmul
from kernels.matmul import matmul
from kernels.norm import layernorm, rmsnorm

def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)

ROWS, HEADS, COLUMNS, ALL = P("x"), P(None, "x"), P(None, None, "x"), P()
x, w, bias = normal(256, 128), normal(128, 256), normal(256)
labels, sizes = jnp.arange(256) % 300, jnp.array([100, 0, 156], jnp.int32)
CASES = {  # function, arrays, how each lies over the devices, how many are differentiated, how the result lies
    "attention": (attention, [normal(1, 4, 128, 64), normal(1, 2, 128, 64), normal(1, 2, 128, 64)], [HEADS] * 3, HEADS),
    "cross_entropy": (cross_entropy, [normal(256, 128), normal(128, 300), labels], [ROWS, ALL, ROWS], ROWS),
    "gated_mlp": (gated_mlp, [x, w, w + 1], [ROWS, ALL, ALL], ROWS),
    "grouped_matmul": (grouped_matmul, [x, normal(3, 128, 256), sizes], [ALL, COLUMNS, ALL], HEADS),
    "matmul": (matmul, [x, w], [ROWS, ALL], ROWS),
    "matmul_bias": (lambda x, y, b: matmul(x, y, bias=b), [x, w, bias], [ROWS, ALL, ALL], ROWS),
    "rmsnorm": (rmsnorm, [normal(256, 128), normal(128)], [ROWS, ALL], ROWS),
    "layernorm": (layernorm, [normal(256, 128), normal(128), normal(128)], [ROWS, ALL, ALL], ROWS),
}
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
found = {}
for name, (function, arrays, specs, out) in CASES.items():
    sharded = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=out)
    floating = tuple(i for i, array in enumerate(arrays) if array.dtype == jnp.float32)

    def loss(f):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x))), argnums=floating))

    ours, want = (jax.tree.leaves(loss(f)(*arrays)) for f in (sharded, function))
    close = [bool(np.allclose(one, other, rtol=1e-3, atol=1e-3)) for one, other in zip(ours, want, strict=True)]
    text = loss(sharded).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    found[name] = {"close": all(close), "kernels": text.count("tpu_custom_call")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sharded() -> dict:
    """Two devices need a process of their own."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run([sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("attention", 2),
        ("cross_entropy", 3),
        ("gated_mlp", 5),
        ("grouped_matmul", 3),
        ("matmul", 3),
        ("matmul_bias", 3),
        ("rmsnorm", 2),
        ("layernorm", 2),
    ],
)
def test_kernels_run_and_differentiate_inside_shard_map(sharded, name, kernels):
    """As without it, weights that all devices share included; and as kernels where there is a TPU."""
    assert sharded[name] == {"close": True, "kernels": kernels}

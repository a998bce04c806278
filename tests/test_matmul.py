"""The matmul by itself: numerics on ragged shapes, its public function, its cost model."""

import csv
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS
from autotune.errors import UsageError
from kernels.matmul import MatmulProblem, matmul, matmul_reference
from kernels.matmul.cost import cost, estimate_ms, heuristic_config
from tests.test_validation import NAN_MEMORY


def operands(m: int, n: int, k: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    x, y = jax.random.split(jax.random.key(m + n + k))
    return jax.random.normal(x, (m, k)).astype(dtype), jax.random.normal(y, (k, n)).astype(dtype)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    block_m=st.sampled_from([16, 32]),
    grid_order=st.sampled_from(["mn", "nm"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_shape_is_right_with_nan_memory(m, n, k, block_m, grid_order, dtype):
    x, y = operands(m, n, k, dtype)
    config = {"block_m": block_m, "block_n": 128, "block_k": 128, "grid_order": grid_order}
    got = matmul(x, y, config=config, interpret=NAN_MEMORY)
    want = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * k**0.5)
    assert got.dtype == x.dtype


def test_held_operand_with_one_buffer():
    x, y = operands(48, 256, 200)
    config = {"block_m": 16, "block_n": 128, "block_k": 200, "held_buffers": 1}
    np.testing.assert_allclose(
        matmul(x, y, config=config, interpret=NAN_MEMORY), matmul_reference(x, y), rtol=1e-5, atol=1e-4
    )


def test_runs_and_differentiates_where_there_is_no_tpu():
    x, y = operands(6, 5, 7)
    batched = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(matmul(batched, y), batched @ y, rtol=1e-5)
    ours = jax.grad(lambda x, y: jnp.sum(jnp.sin(matmul(x, y))), argnums=(0, 1))(x, y)
    plain = jax.grad(lambda x, y: jnp.sum(jnp.sin(x @ y)), argnums=(0, 1))(x, y)
    for got, want in zip(ours, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [((4, 5), (6, 7), r"must be \[\.\.\., m, k\] with \[k, n\]"), ((5,), (5, 7), "must be"), ((4, 5), (5,), "must be")],
)
def test_shapes_that_do_not_fit_are_refused(x, y, says):
    with pytest.raises(UsageError, match=says):
        matmul(jnp.ones(x), jnp.ones(y))


def test_mixed_dtypes_are_refused():
    with pytest.raises(UsageError, match="must be both bfloat16, float32, int8"):
        matmul(jnp.ones((4, 4)), jnp.ones((4, 4), jnp.bfloat16))


# block_m, block_n, block_k, median ms: 8192³ bfloat16 on a v5e, AMLeng/tpu-kernels, bench_history/matmul.
MEASURED_V5E = """
1024,1024,512,5.900
1024,512,1024,5.909
1024,1024,256,6.119
1024,1024,128,6.505
512,512,1024,6.589
512,512,512,7.363
1024,512,128,7.999
512,512,256,8.675
256,512,1024,8.934
1024,256,256,9.685
512,512,128,11.089
256,256,1024,12.164
1024,128,512,13.164
256,256,512,14.618
512,128,512,16.185
128,1024,128,19.235
256,256,256,19.724
1024,128,128,20.774
128,256,512,22.832
256,256,128,28.963
128,128,512,35.831
128,256,128,51.104
128,128,128,91.252
"""


def test_estimate_ranks_measured_times():
    rows = [[float(cell) for cell in row] for row in csv.reader(MEASURED_V5E.split())]
    problem = MatmulProblem(m=8192, n=8192, k=8192)
    estimates = [
        estimate_ms(problem, {"block_m": int(m), "block_n": int(n), "block_k": int(k)}, CHIPS["v5e"])
        for m, n, k, _ in rows
    ]
    measured = [row[3] for row in rows]
    ranks = [np.argsort(np.argsort(values)) for values in (estimates, measured)]
    assert np.corrcoef(*ranks)[0, 1] > 0.98
    assert np.mean(np.abs(np.divide(estimates, measured) - 1)) < 0.1


@given(m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(1, 9000))
@settings(max_examples=50, deadline=None)
def test_no_estimate_beats_the_roofline(m, n, k):
    problem = MatmulProblem(m=m, n=n, k=k)
    for chip in CHIPS.values():
        assert estimate_ms(problem, heuristic_config(problem), chip) >= 0.99 * cost(problem).roofline_ms(chip)


def test_problems_load_no_jax():
    script = (
        "import sys, kernels.matmul.problem, kernels.attention.problem, kernels.matmul.cost, kernels.attention.cost;"
        "import search_spaces.matmul, search_spaces.attention; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

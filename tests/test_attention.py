"""Attention by itself: numerics on ragged shapes, which blocks it works on, its public function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS
from autotune.errors import UsageError
from kernels.attention import PROBLEMS, attention, attention_reference
from kernels.attention import pallas as flash
from kernels.attention import reference as references
from kernels.attention.blocks import Blocks
from kernels.attention.cost import cost, estimate_ms, heuristic_config
from tests.test_validation import NAN_MEMORY


def arrays(q_len: int, kv_len: int, *, heads: int = 2, kv_heads: int = 1, dim: int = 32, dtype: str = "float32"):
    shapes = [(1, heads, q_len, dim), (1, kv_heads, kv_len, dim), (1, kv_heads, kv_len, dim)]
    keys = jax.random.split(jax.random.key(q_len + kv_len), 3)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def plain(q, k, v, causal: bool) -> np.ndarray:
    """Softmax attention in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    out = np.empty(q.shape)
    for b, h, i in np.ndindex(q.shape[:3]):
        seen = slice(0, i + offset + 1 if causal else None)
        scores = k[b, h // group, seen] @ q[b, h, i] / q.shape[3] ** 0.5
        weights = np.exp(scores - scores.max())
        out[b, h, i] = weights @ v[b, h // group, seen] / weights.sum()
    return out


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    q_len=st.integers(1, 100),
    more=st.integers(0, 200),
    block_q=st.sampled_from([32, 128]),
    block_kv=st.sampled_from([128, 256]),
    causal=st.booleans(),
    tile_q=st.sampled_from([32, 16]),
    unroll=st.sampled_from([1, 2]),
    row_sum=st.sampled_from(["vpu", "mxu"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@example(
    q_len=256, more=0, block_q=128, block_kv=256, tile_q=64, unroll=2, causal=True, row_sum="mxu", dtype="float32"
)  # fmt: skip
@example(
    q_len=70, more=200, block_q=16, block_kv=256, tile_q=16, unroll=1, causal=True, row_sum="vpu", dtype="float32"
)  # fmt: skip
@example(
    q_len=150, more=0, block_q=128, block_kv=256, tile_q=32, unroll=2, causal=False, row_sum="mxu", dtype="float32"
)
def test_any_shape_is_right_with_nan_memory(q_len, more, block_q, block_kv, tile_q, unroll, causal, row_sum, dtype):
    q, k, v = arrays(q_len, q_len + more, dtype=dtype)
    config = {
        "block_q": block_q,
        "block_kv": block_kv,
        "block_q_compute": tile_q,
        "block_kv_compute": 128,
        "unroll": unroll,
        "row_sum": row_sum,
    }
    got = np.asarray(attention(q, k, v, causal=causal, config=config, interpret=NAN_MEMORY), np.float64)
    np.testing.assert_allclose(got, plain(q, k, v, causal), atol=2e-5 if dtype == "float32" else 3e-2)


def test_query_heads_in_a_row_share_a_kv_head():
    q, k, v = arrays(40, 40, heads=6, kv_heads=3)
    config = {"block_q": 16, "block_kv": 128, "block_kv_compute": 128}
    got = attention(q, k, v, config=config, interpret=NAN_MEMORY)
    np.testing.assert_allclose(got, plain(q, k, v, True), atol=2e-5)


def test_runs_and_differentiates_where_there_is_no_tpu():
    q, k, v = arrays(9, 12)
    np.testing.assert_allclose(attention(q, k, v), plain(q, k, v, True), atol=2e-5)
    ours = jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), argnums=(0, 1, 2))(q, k, v)
    theirs = jax.grad(lambda *x: jnp.sum(jnp.sin(attention_reference(*x))), argnums=(0, 1, 2))(q, k, v)
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_in_pieces_is_the_reference(monkeypatch, causal):
    q, k, v = arrays(70, 90, heads=6, kv_heads=2)
    monkeypatch.setattr(references, "PIECE", 5000)
    got = references.attention_in_pieces(q, k, v, causal=causal)
    np.testing.assert_allclose(got, attention_reference(q, k, v, causal=causal), rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow():
    q, k, v = arrays(64, 64)
    config = {"block_q": 32, "block_kv": 128, "block_kv_compute": 128}
    got = attention(1e3 * q, 1e3 * k, v, config=config, interpret=NAN_MEMORY)
    np.testing.assert_allclose(got, plain(1e3 * q, 1e3 * k, v, True), atol=1e-3)


def test_arguments_that_do_not_fit_are_refused():
    q, k, v = arrays(8, 8, heads=4, kv_heads=3)
    with pytest.raises(UsageError, match="kv_heads=3 does not divide heads=4: use 1, 2 or 4"):
        attention(q, k, v)
    q, k, v = arrays(9, 8)
    with pytest.raises(UsageError, match="q_len=9 exceeds kv_len=8"):
        attention(q, k, v)
    with pytest.raises(UsageError, match="must all be"):
        attention(q, k.astype(jnp.bfloat16), v, causal=False)
    with pytest.raises(UsageError, match=r"must be \[batch, heads, q_len, head_dim\]"):
        attention(q, k[:, :, :, :16], v, causal=False)


@settings(max_examples=60, deadline=None)
@given(
    q_len=st.integers(1, 400),
    more=st.integers(0, 300),
    block_q=st.sampled_from([16, 64, 128, 256]),
    block_kv=st.sampled_from([128, 256, 384]),
    causal=st.booleans(),
)
def test_the_loops_take_each_tile_that_is_seen_and_mask_each_that_is_cut(q_len, more, block_q, block_kv, causal):
    tile_q, tile_kv, kv_len = 16, 128, q_len + more
    blocks = Blocks(q_len, kv_len, block_q, block_kv, tile_q, tile_kv, causal)
    query, key = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    seen = (key <= query + more) if causal else np.ones((q_len, kv_len), bool)
    for i, j in np.ndindex(blocks.q_blocks, blocks.kv_blocks):
        for r in range(int(flash.tile_rows(blocks, i))):
            clear, end = (int(n) for n in flash.visible(blocks, i, j, r * tile_q))
            rows = slice(i * block_q + r * tile_q, min(q_len, i * block_q + (r + 1) * tile_q))
            for c in range(blocks.column_tiles):
                start = j * block_kv + c * tile_kv
                tile = seen[rows, start : start + tile_kv]
                whole = tile.shape[1] == tile_kv and tile.all()
                assert c < end or not tile.any()
                assert c >= clear or whole
            assert i * blocks.block_q + r * tile_q < q_len


def test_no_estimate_beats_the_roofline_and_128_wide_blocks_rank_last():
    for problem in PROBLEMS.values():
        small = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128}
        for chip in CHIPS.values():
            good = estimate_ms(problem, heuristic_config(problem), chip)
            assert cost(problem).roofline_ms(chip) <= good < estimate_ms(problem, small, chip)

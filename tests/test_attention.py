"""Attention by itself: numerics on ragged shapes, which blocks it works on, its public function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS
from autotune.errors import UsageError
from kernels.attention import PROBLEMS, attention, attention_reference, tiles
from kernels.attention import reference as references
from kernels.attention.blocks import Blocks
from kernels.attention.cost import cost, estimate_ms, heuristic_config
from tests.test_validation import NAN_MEMORY


def arrays(q_len, kv_len, *, heads=2, kv_heads=1, dim=32, v_dim=None, dtype="float32"):
    shapes = [(1, heads, q_len, dim), (1, kv_heads, kv_len, dim), (1, kv_heads, kv_len, v_dim or dim)]
    keys = jax.random.split(jax.random.key(q_len + kv_len), 3)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def some_segments(length: int, count: int) -> jax.Array:
    """`count` sequences of different lengths in a row; the last may be missing in a row with fewer."""
    return jnp.asarray(np.sort(np.random.default_rng(length).integers(0, count, (1, length))), jnp.int32)


def plain(q, k, v, causal: bool, window=None, soft_cap=None, ids=None) -> np.ndarray:
    """Softmax attention in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(q.shape[:3]):
        key = np.arange(k.shape[2])
        seen = key <= i + offset if causal else key >= 0
        if window:
            seen &= key > i + offset - window
        if ids:
            seen &= np.asarray(ids[1][b]) == int(ids[0][b, i])
        if seen.any():
            scores = k[b, h // group, seen] @ q[b, h, i] / q.shape[3] ** 0.5
            scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
            weights = np.exp(scores - scores.max())
            out[b, h, i] = weights @ v[b, h // group, seen] / weights.sum()
    return out


SHAPES = {
    "q_len": st.integers(1, 200),
    "more": st.integers(0, 200),
    "block_q": st.sampled_from([128, 256]),
    "block_kv": st.sampled_from([128, 256]),
    "mask": st.sampled_from([{}, {"causal": False}]) | st.fixed_dictionaries({"window": st.integers(1, 300)}),
    "soft_cap": st.sampled_from([None, 3.0]),
    "packed": st.booleans(),
    "tile_q": st.sampled_from([32, 16]),
    "unroll": st.sampled_from([1, 2]),
    "row_sum": st.sampled_from(["vpu", "mxu"]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
}


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(**SHAPES)
def test_any_shape_is_right_with_nan_memory(**shape):
    check_against_the_definition(**shape)


@settings(deadline=None, phases=[Phase.explicit])
@given(**SHAPES)
@example(
    q_len=256, more=0, block_q=128, block_kv=256, tile_q=64, unroll=2, mask={}, soft_cap=None, packed=False,
    row_sum="mxu", dtype="float32",
)  # fmt: skip
@example(
    q_len=70, more=200, block_q=16, block_kv=256, tile_q=16, unroll=1, mask={"window": 100}, soft_cap=2.0,
    packed=False, row_sum="vpu", dtype="float32",
)  # fmt: skip
@example(
    q_len=150, more=0, block_q=128, block_kv=256, tile_q=32, unroll=2, mask={"causal": False}, soft_cap=None,
    packed=False, row_sum="mxu", dtype="float32",
)  # fmt: skip
@example(
    q_len=200, more=-90, block_q=128, block_kv=128, tile_q=64, unroll=2, mask={"causal": False}, soft_cap=None,
    packed=True, row_sum="vpu", dtype="float32",
)  # fmt: skip
def test_these_shapes_are_right_with_nan_memory(**shape):
    check_against_the_definition(**shape)


def check_against_the_definition(
    q_len, more, block_q, block_kv, mask, soft_cap, packed, tile_q, unroll, row_sum, dtype
):
    q, k, v = arrays(q_len, q_len + more, v_dim=48, dtype=dtype)
    ids = (some_segments(q_len, 4), some_segments(q_len + more, 3)) if packed else None
    config = {
        "block_q": block_q,
        "block_kv": block_kv,
        "block_q_compute": tile_q,
        "block_kv_compute": 128,
        "unroll": unroll,
        "row_sum": row_sum,
    }
    options = {"causal": True, "soft_cap": soft_cap, **mask}
    got = attention(q, k, v, segment_ids=ids, **options, config=config, interpret=NAN_MEMORY)
    right = plain(q, k, v, ids=ids, **options)
    np.testing.assert_allclose(np.asarray(got, np.float64), right, atol=2e-5 if dtype == "float32" else 3e-2)


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


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 20, "soft_cap": 2.0}])
@pytest.mark.parametrize("packed", [True, False])
def test_the_reference_in_pieces_is_the_reference(monkeypatch, options, packed):
    q, k, v = arrays(70, 90, heads=6, kv_heads=2, v_dim=48)
    ids = (some_segments(70, 3), some_segments(90, 3)) if packed else ()
    monkeypatch.setattr(references, "PIECE", 5000)
    got = references.attention_in_pieces(q, k, v, *ids, **options)
    want = attention_reference(q, k, v, *ids, **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(want, plain(q, k, v, ids=ids, **{"causal": True, **options}), rtol=1e-4, atol=1e-5)


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
    with pytest.raises(UsageError, match="window=4: needs causal=true"):
        attention(q, k, v, causal=False, window=4)
    with pytest.raises(UsageError, match=r"soft_cap=-1.0: must be a positive number"):
        attention(q, k, v, causal=False, soft_cap=-1.0)
    with pytest.raises(UsageError, match="must be integers of"):
        attention(q, k, v, causal=False, segment_ids=jnp.zeros((1, 9), jnp.int32))
    with pytest.raises(UsageError, match="must be integers of"):
        attention(q, k, v, causal=False, segment_ids=[[0, 1]])
    with pytest.raises(UsageError, match="soft_cap='50': must be a number"):
        attention(q, k, v, causal=False, soft_cap="50")
    with pytest.raises(UsageError, match=r"window=2\.5: must be an integer"):
        attention(k, k, v, window=2.5)
    with pytest.raises(UsageError, match="block_kv_compute=192 must divide block_kv=256"):
        attention(k, k, v, config={"block_q": 128, "block_kv": 256, "block_kv_compute": 192}, interpret=NAN_MEMORY)
    with pytest.raises(UsageError, match="backward=both: must be split or fused"):
        attention(q, k, v, causal=False, backward="both")


@settings(max_examples=80, deadline=None)
@given(
    q_len=st.integers(1, 400),
    more=st.integers(0, 300),
    block_q=st.sampled_from([16, 64, 128, 256]),
    block_kv=st.sampled_from([128, 256, 384]),
    window=st.integers(1, 700) | st.none(),
    causal=st.booleans(),
)
def test_the_loops_take_each_tile_that_is_seen_once_and_mask_each_that_is_cut(
    q_len, more, block_q, block_kv, window, causal
):
    height, width, kv_len = 16, 128, q_len + more
    window = window if causal else None
    blocks = Blocks(q_len, kv_len, block_q, block_kv, height, width, causal, window)
    query, key = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    seen = (key <= query + more) if causal else np.ones((q_len, kv_len), bool)
    if window:
        seen &= key > query + more - window

    def check(found: dict, i: int, j: int, row: int, column: int, masked: bool):
        """A tile that is taken; `found` has those that were."""
        rows, columns = i * block_q + row * height, j * block_kv + column * width
        assert (rows, columns) not in found
        tile = seen[rows : rows + height, columns : columns + width]
        assert masked or (tile.all() and tile.shape[1] == width)
        found[rows, columns] = tile

    def taken(ranges):
        """(tile, masked) in the order of the loops, which are the kernels' own."""
        first, clear, cut, end = (int(n) for n in ranges)
        right = max(clear, cut)
        return [
            (t, not clear <= t < cut) for t in [*range(first, min(clear, end)), *range(clear, cut), *range(right, end)]
        ]

    by_row, by_column = {}, {}
    for i, step in np.ndindex(blocks.q_blocks, blocks.kv_steps):
        j, needed = (int(n) for n in tiles.kv_block(blocks, i, step))
        for row in range(int(tiles.row_tiles(blocks, i))) if j >= needed else ():
            for column, masked in taken(tiles.key_tiles(blocks, i, j, row * height)):
                check(by_row, i, j, row, column, masked)
    for j, step in np.ndindex(blocks.kv_blocks, blocks.q_steps):
        i, needed = (int(n) for n in tiles.q_block(blocks, j, step))
        for column in range(blocks.column_tiles) if i >= needed else ():
            for row, masked in taken(tiles.query_tiles(blocks, i, j, column * width)):
                check(by_column, i, j, row, column, masked or blocks.uneven_kv)
    for found in (by_row, by_column):
        assert sum(tile.sum() for tile in found.values()) == seen.sum()
    assert all(tile.any() for tile in by_row.values())


def test_no_estimate_beats_the_roofline_and_128_wide_blocks_rank_last():
    for problem in PROBLEMS.values():
        small = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128}
        for chip in CHIPS.values():
            good = estimate_ms(problem, heuristic_config(problem), chip)
            assert cost(problem).roofline_ms(chip) <= good < estimate_ms(problem, small, chip)

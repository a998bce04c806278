"""Attention's gradients: numerics on ragged shapes, and wrong kernels that validation rejects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from autotune.validation import validate
from kernels.attention import attention, attention_reference, backward
from kernels.attention import pallas as flash
from kernels.attention.reference import attention_lse
from search_spaces.attention_backward import AttentionDkvKernel, AttentionDqKernel
from tests.test_attention import arrays
from tests.test_validation import NAN_MEMORY, REJECTED, rewrite

BLOCKS = {"block_q": 128, "block_kv": 128}


@settings(max_examples=1, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    q_len=st.integers(1, 300),
    more=st.integers(0, 200),
    group=st.integers(1, 3),
    causal=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@example(q_len=300, more=81, group=2, causal=True, dtype="float32")
@example(q_len=200, more=-130, group=1, causal=False, dtype="float32")
def test_gradients_are_those_of_the_reference(q_len, more, group, causal, dtype):
    q, k, v = arrays(q_len, q_len + more, heads=2 * group, kv_heads=2, dim=32, dtype=dtype)
    weight = jax.random.normal(jax.random.key(more + 999), q.shape)

    def gradients(function, *qkv):
        return jax.grad(lambda *x: jnp.sum(function(*x) * weight), argnums=(0, 1, 2))(*qkv)

    blocks = {"config": {"block_q": 64, "block_kv": 128}, "dq_config": BLOCKS, "dkv_config": BLOCKS}
    got = gradients(lambda *x: attention(*x, causal=causal, **blocks, interpret=NAN_MEMORY), q, k, v)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    want = gradients(lambda *x: attention_reference(*x, causal=causal), *wide)
    for one, right in zip(got, want, strict=True):
        assert one.dtype == q.dtype
        off, size = np.linalg.norm(one.astype(jnp.float32) - right), np.linalg.norm(right)
        assert off < (1e-5 if dtype == "float32" else 2e-2) * max(size, 1.0)  # one key alone has no gradient


def test_the_forward_pass_saves_the_log_sum_exp():
    q, k, v = arrays(150, 200, heads=4, kv_heads=2)
    for row_sum in ("vpu", "mxu"):
        options = {"block_q": 64, "block_kv": 128, "row_sum": row_sum}
        out, lse = flash.attention_pallas(q, k, v, save_lse=True, interpret=NAN_MEMORY, **options)
        np.testing.assert_allclose(lse, attention_lse(q, k), rtol=1e-5)
        np.testing.assert_allclose(out, attention_reference(q, k, v), atol=1e-5)


@pytest.mark.parametrize("kernel", [AttentionDqKernel(), AttentionDkvKernel()])
@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({}, {"block_q_compute": 128, "block_kv_compute": 128}),
        pytest.param({"causal": False, "dtype": "float32"}, {}, marks=pytest.mark.slow),
        pytest.param({"batch": 2, "heads": 6, "q_len": 1000, "kv_len": 1777}, {}, marks=pytest.mark.slow),
    ],
)
def test_right_kernels_pass(kernel, fields, config):
    verdict = validate(kernel, *instance(kernel, fields, config))
    assert verdict.ok, verdict.message


def instance(kernel, fields, config):
    problem = kernel.problem_type(
        batch=1, heads=2, kv_heads=1, q_len=1024, kv_len=1024, head_dim=32, dtype="bfloat16"
    ).replace(fields)
    return problem, {"block_q": 256, "block_kv": 256, "block_q_compute": 256, "block_kv_compute": 256, **config}


DQ, DKV = (AttentionDqKernel(), "attention_dq_pallas"), (AttentionDkvKernel(), "attention_dkv_pallas")
TILES = {"block_q_compute": 128, "block_kv_compute": 128}
FULL = {"causal": False}
WRONG = {
    "dq: mask one less": (DQ, "column - row > shift", "column - row >= shift", {}),
    "dq: mask one more": (DQ, "column - row > shift", "column - row > shift + 1", {}),
    "dq: keys past the end": (DQ, "            if blocks.uneven_kv:\n", "            if False:\n", {}),
    "dq: delta left out": (DQ, " - delta[rows, :1])", ")", {}),
    "dq: residual to base e": (DQ, "_to_column(lse, lse_ref, LOG2E)", "_to_column(lse, lse_ref, 1.0)", {}),
    "dq: statistics of the first lanes": (DQ, "row_ref[:, first : first + size] *", "row_ref[:, :size] *", {}),
    "dq: unscaled": (DQ, "(acc[...] * scale)", "acc[...]", {}),
    "dq: a seen tile skipped": (DQ, "fori_loop(clear, seen, lambda c", "fori_loop(clear, seen - 1, lambda c", {}),
    "dq: groups of one": (DQ, "return b, lax.div(h, group), jnp", "return b, lax.div(h, heads), jnp", {"kv_heads": 2}),
    "dkv: mask one less": (DKV, "key - query <= blocks", "key - query < blocks", {}),
    "dkv: queries past the end": (DKV, "            if blocks.uneven_q:\n", "            if False:\n", {}),
    "dkv: rows past the end": (DKV, "if masked and blocks.uneven_q:", "if False:", FULL),
    "dkv: first head of the group only": (DKV, "return b, h * group + g,", "return b, h * group,", {}),
    "dkv: last head of the group only": (DKV, "@pl.when((g == 0) & (step == 0))", "@pl.when(step == 0)", {}),
    "dkv: a needed tile skipped": (DKV, "fori_loop(needed, jnp", "fori_loop(needed + 1, jnp", {}),
    "dkv: uneven tile skipped": (DKV, "            first = jnp.maximum(clear, full)", "            first = end", FULL),
    "dkv: first block skipped": (DKV, "pl.when(step >= first_i)", "pl.when(step > first_i)", {}),
    "dkv: delta of another row": (DKV, "delta_ref[:, queries])", "jnp.roll(delta_ref[:, queries], 1))", {}),
    "dkv: unscaled": (DKV, "(dk[...] * scale)", "dk[...]", {}),
}
QUICK = {"dq: mask one less", "dq: delta left out", "dkv: last head of the group only", "dkv: mask one less"}


@pytest.mark.parametrize(
    ("which", "old", "new", "fields"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in WRONG.items()],
)
def test_wrong_texts_are_rejected(monkeypatch, which, old, new, fields):
    kernel, function = which
    rewrite(monkeypatch, backward, function, old, new)
    verdict = validate(kernel, *instance(kernel, fields, TILES))
    assert verdict.status in REJECTED, verdict

"""Attention's gradients: numerics on ragged shapes, and wrong kernels that validation rejects."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS
from autotune.errors import UsageError
from autotune.kernel import get_kernel
from autotune.validation import validate
from kernels.attention import api, attention, attention_reference, backward, backward_tiles, tiles
from kernels.attention import pallas as flash
from kernels.attention.cost import fused_heuristic_config
from kernels.attention.reference import attention_lse
from search_spaces.attention import AttentionKernel
from search_spaces.attention_backward import AttentionBwdKernel, AttentionDkvKernel, AttentionDqKernel
from tests.test_attention import arrays, some_segments
from tests.test_spaces import compile_all
from tests.test_validation import NAN_MEMORY, REJECTED, rewrite

BLOCKS = {"block_q": 128, "block_kv": 128}


SHAPES = {
    "q_len": st.integers(1, 300),
    "more": st.integers(0, 200),
    "group": st.integers(1, 3),
    "options": st.fixed_dictionaries(
        {"causal": st.just(True), "soft_cap": st.sampled_from([None, 3.0])}, optional={"window": st.integers(1, 300)}
    ),
    "packed": st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "backward": st.sampled_from(["split", "fused"]),
}
UNMASKED, CAPPED = {"causal": False}, {"causal": False, "soft_cap": 2.0}


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(**SHAPES)
@example(q_len=300, more=81, group=2, options={}, packed=False, dtype="float32", backward="split")
@example(q_len=200, more=-130, group=1, options=CAPPED, packed=True, dtype="float32", backward="fused")
def test_gradients_of_any_shape_are_those_of_the_reference(**shape):
    check_against_the_reference(**shape)


@settings(deadline=None, phases=[Phase.explicit])
@given(**SHAPES)
@example(q_len=300, more=81, group=1, options={"window": 150}, packed=True, dtype="bfloat16", backward="fused")
@example(q_len=200, more=-130, group=1, options=UNMASKED, packed=False, dtype="float32", backward="split")
def test_gradients_are_those_of_the_reference(**shape):
    check_against_the_reference(**shape)


def check_against_the_reference(q_len, more, group, options, packed, dtype, backward):
    q, k, v = arrays(q_len, q_len + more, heads=2 * group, kv_heads=2, dim=32, v_dim=48, dtype=dtype)
    weight = jax.random.normal(jax.random.key(more + 999), (*q.shape[:3], 48))
    ids = (some_segments(q_len, 4), some_segments(q_len + more, 3)) if packed else ()

    def gradients(function, *qkv):
        return jax.grad(lambda *x: jnp.sum(function(*x) * weight), argnums=(0, 1, 2))(*qkv)

    configs = {"config": {"block_q": 128, "block_kv": 128, "block_q_compute": 64}}
    configs |= {f"{name}_config": BLOCKS for name in ("dq", "dkv", "bwd")}
    ours = {**options, **configs, "backward": backward, "segment_ids": ids or None, "interpret": NAN_MEMORY}
    got = gradients(lambda *x: attention(*x, **ours), q, k, v)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    want = gradients(lambda *x: attention_reference(*x, *ids, **options), *wide)
    for one, right in zip(got, want, strict=True):
        assert one.dtype == q.dtype
        off, size = np.linalg.norm(one.astype(jnp.float32) - right), np.linalg.norm(right)
        assert off < (1e-5 if dtype == "float32" else 2e-2) * max(size, 1.0)  # one key alone has no gradient


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("v4", "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("v4", "float32"), ("v5e", "bfloat16"), ("v5e", "float32"))
        ),
    ],
)
def test_the_longest_heads_whose_sums_are_said_to_fit_compile(target, dtype):
    """Where no preset is, training code takes the heuristic: it must compile."""
    kernel, chip = AttentionBwdKernel(), CHIPS[target]

    def problem(length):
        fields = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": length, "kv_len": length, "head_dim": 128}
        return kernel.problem_type(**fields, dtype=dtype)

    def limit(length):
        return (fused_heuristic_config(problem(length), chip) or {}).get("vmem_limit_mib")

    lengths = range(1024, 40000, 512)
    longest = {limit(length): length for length in lengths if limit(length)}
    configs = [(str(problem(length)), dict(kernel.heuristic(problem(length), chip))) for length in longest.values()]
    assert configs
    assert set(compile_all("attention_bwd", target, configs)) == {"ok"}


def test_one_backward_kernel_where_it_fits_and_two_where_it_does_not(monkeypatch):
    ran = []
    names = ("attention_dq_pallas", "attention_dkv_pallas", "attention_bwd_pallas")
    for name in names:
        monkeypatch.setattr(api, name, functools.partial(lambda name, *_, **__: ran.append(name), name))

    def gradient(**options):
        ran.clear()
        with contextlib.suppress(TypeError):  # What takes the kernels' place gives nothing.
            q, k, v = arrays(128, 128)
            jax.grad(lambda q: jnp.sum(attention(q, k, v, config=BLOCKS, interpret=NAN_MEMORY, **options)))(q)
        return ran

    assert gradient() == ["attention_bwd_pallas"]
    assert gradient(backward="split")[0] == gradient(dq_config=BLOCKS)[0] == "attention_dq_pallas"
    monkeypatch.setattr(api, "attached_chip", lambda: CHIPS["v4"])
    assert gradient(bwd_config=BLOCKS) == ["attention_bwd_pallas"]
    monkeypatch.setattr(api, "_fused_fits", lambda problem: False)
    assert gradient(bwd_config=BLOCKS) == ["attention_bwd_pallas"], "a config of one's own is used"
    monkeypatch.undo()
    monkeypatch.setattr(api, "attached_chip", lambda: CHIPS["v4"])
    long = AttentionKernel.problem_type(batch=1, heads=8, kv_heads=8, q_len=65536, kv_len=65536, head_dim=128)
    assert [api._fused_fits(long.replace({"kv_len": n, "q_len": n})) for n in (1024, 65536)] == [True, False]
    with pytest.raises(UsageError, match=r"backward='split'"):
        AttentionBwdKernel().heuristic(long, CHIPS["v4"])


def test_the_forward_pass_saves_the_log_sum_exp():
    q, k, v = arrays(150, 200, heads=4, kv_heads=2)
    for row_sum, mask in (("vpu", {"soft_cap": 3.0, "window": 90}), ("mxu", {})):
        options = {"block_q": 64, "block_kv": 128, "row_sum": row_sum}
        out, lse = flash.attention_pallas(q, k, v, save_lse=True, interpret=NAN_MEMORY, **options, **mask)
        np.testing.assert_allclose(lse, attention_lse(q, k, **mask), rtol=1e-5)
        np.testing.assert_allclose(out, attention_reference(q, k, v, **mask), atol=1e-5)


@pytest.mark.parametrize("kernel", [AttentionDqKernel(), AttentionDkvKernel(), AttentionBwdKernel()])
@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({}, {"block_q_compute": 128, "block_kv_compute": 128}),
        pytest.param({"causal": False, "dtype": "float32"}, {}, marks=pytest.mark.slow),
        pytest.param({"batch": 2, "heads": 6, "q_len": 1000, "kv_len": 1777}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"window": 300, "soft_cap": 5.0, "v_head_dim": 64},
            {"block_kv": 128, "block_kv_compute": 128},
            marks=pytest.mark.slow,
        ),
        pytest.param({"packed": True}, {"block_q": 128, "block_q_compute": 128}, marks=pytest.mark.slow),
    ],
)
def test_right_kernels_pass(kernel, fields, config):
    verdict = validate(kernel, *instance(kernel, fields, config))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("kernel", ["attention", "attention_dq", "attention_dkv", "attention_bwd"])
@pytest.mark.parametrize(
    "target", ["v5e", pytest.param("v7x", marks=pytest.mark.slow), pytest.param("v4", marks=pytest.mark.slow)]
)
def test_short_and_odd_lengths_compile(kernel, target):
    """What the heuristic takes for them, and one block and one tile of all of it."""
    found = get_kernel(kernel)
    texts = [
        "q_len=200,kv_len=200",
        "q_len=200,kv_len=200,packed=true",
        "q_len=1,kv_len=300",
        "q_len=577,kv_len=577,window=100",
    ]
    if target != "v5e":
        texts += [
            "q_len=3,kv_len=7,packed=true",
            "q_len=577,kv_len=600,soft_cap=5,head_dim=80,v_head_dim=72,dtype=float32",
        ]
    texts = [
        f"heads=2,kv_heads=1,head_dim=128,{text}" if "head_dim" not in text else f"heads=2,kv_heads=1,{text}"
        for text in texts
    ]
    problems = [found.parse_problem(text) for text in texts]
    configs = [(text, dict(found.heuristic(one, CHIPS[target]))) for text, one in zip(texts, problems, strict=True)]
    last = problems[3]
    whole = {
        "block_q": last.q_len,
        "block_kv": last.kv_len,
        "block_q_compute": last.q_len,
        "block_kv_compute": last.kv_len,
    }
    configs.append((texts[3], dict(found.space(last, CHIPS[target]).parse(whole))))
    assert set(compile_all(kernel, target, configs)) == {"ok"}


@pytest.mark.parametrize("window", [*(pytest.param(n, marks=pytest.mark.slow) for n in (129, 250)), 4097])
def test_windows_are_validated_as_wide_as_they_are(monkeypatch, window):
    """A right kernel passes; one whose softmax is wrong does not, even if the window's rest would hide it."""
    fields = {"window": window, "q_len": 8192, "kv_len": 8192, "heads": 1}
    problem, config = instance(AttentionKernel(), fields, {"block_q": 128, "block_kv": 128, **TILES})
    small = AttentionKernel().validation_problems(problem, config)
    assert any(one.window is not None and 128 < one.window < one.kv_len - 128 for one in small)
    verdict = validate(AttentionKernel(), problem, config)
    assert verdict.ok, verdict.message
    rewrite(monkeypatch, (tiles, flash), "attention_pallas", "else self.scale * LOG2E", "else 3 * self.scale * LOG2E")
    assert validate(AttentionKernel(), problem, config).status in REJECTED


def instance(kernel, fields, config):
    problem = kernel.problem_type(
        batch=1, heads=2, kv_heads=1, q_len=1024, kv_len=1024, head_dim=32, dtype="bfloat16"
    ).replace(fields)
    return problem, {"block_q": 256, "block_kv": 256, "block_q_compute": 256, "block_kv_compute": 256, **config}


DQ, DKV = (AttentionDqKernel(), "attention_dq_pallas"), (AttentionDkvKernel(), "attention_dkv_pallas")
BWD = (AttentionBwdKernel(), "attention_bwd_pallas")
TILES = {"block_q_compute": 128, "block_kv_compute": 128}
FULL, WINDOW, PACKED = {"causal": False}, {"window": 300}, {"packed": True}
WRONG = {
    "dq: mask one less": (DQ, "key - query <= shift", "key - query < shift", {}),
    "dq: mask one more": (DQ, "key - query <= shift", "key - query <= shift + 1", {}),
    "dq: keys past the end": (
        DQ,
        "if blocks.uneven_kv:\n                    keys",
        "if False:\n                    keys",
        {},
    ),
    "dq: delta left out": (DQ, "weights * (grad_products - delta)", "weights * grad_products", {}),
    "dq: residual to base e": (DQ, "to_column(lse, lse_ref, lambda row: row * LOG2E)", "to_column(lse, lse_ref)", {}),
    "dq: statistics of the first lanes": (DQ, "row_ref[:, first : first + size]", "row_ref[:, :size]", {}),
    "dq: unscaled": (DQ, "(acc[...] * scores.scale)", "acc[...]", {}),
    "dq: a seen tile skipped": (
        DQ,
        "    return first, clear, cut, end\n\n\ndef q",
        "    return first, clear, cut, end - 1\n\n\ndef q",
        {},
    ),
    "dq: groups of one": (DQ, "return b, lax.div(h, group), jnp", "return b, lax.div(h, heads), jnp", {"kv_heads": 2}),
    "dq: slope of the cap left out": (DQ, "change * slope", "change", {"soft_cap": 2.0}),
    "dq: segments ignored": (DQ, "if segments is not None:", "if False:", PACKED),
    "dkv: mask one less": (DKV, "key - query <= shift", "key - query < shift", {}),
    "dkv: queries past the end": (
        DKV,
        "if blocks.uneven_q:\n            q, grad",
        "if False:\n            q, grad",
        {},
    ),
    "dkv: rows past the end": (DKV, "query < blocks.queries_left(i) - first_row", "query < blocks.q_len", FULL),
    "dkv: first head of the group only": (DKV, "return b, h * group + g, jnp", "return b, h * group, jnp", {}),
    "dkv: last head of the group only": (DKV, "pl.when((head == 0) & (step == 0))", "pl.when(step == 0)", {}),
    "dkv: a needed tile skipped": (
        DKV,
        "first = lax.div(jnp.maximum(first_row, 0)",
        "first = 1 + lax.div(jnp.maximum(first_row, 0)",
        {},
    ),
    "dkv: uneven tile skipped": (DKV, "lax.div(left + height - 1, height)", "lax.div(left, height)", FULL),
    "dkv: first block skipped": (DKV, "pl.when(i >= first_i)", "pl.when(i > first_i)", {}),
    "dkv: delta of another row": (DKV, "delta_ref[:, queries]", "jnp.roll(delta_ref[:, queries], 1)", {}),
    "dkv: unscaled": (DKV, "(dk[...] * scores.scale)", "dk[...]", {}),
    "dkv: window's edge unmasked": (
        DKV,
        "lax.div(first_row + blocks.window, height)",
        "lax.div(first_row + blocks.window + height, height)",
        WINDOW,
    ),
    "dkv: window's last tile skipped": (DKV, "blocks.window - 2 + height", "blocks.window - 2", WINDOW),
    "dkv: window's last block skipped": (DKV, "blocks.block_kv - 1 + blocks.window - 1", "blocks.block_kv - 1", WINDOW),
    "dkv: first keys' segments": (DKV, "kv_ids[0][columns, :]", "kv_ids[0][: blocks.block_kv_compute, :]", PACKED),
    "bwd: all keys are the first block's": (
        BWD,
        "first_key = aligned(j, blocks.block_kv, blocks.kv_blocks)",
        "first_key = 0",
        {},
    ),
    "bwd: last head of the group only": (BWD, "(head == 0) & (i == 0) & (step == 0)", "(i == 0) & (step == 0)", {}),
    "bwd: dq of all blocks": (BWD, "dq[...] = jnp.zeros_like(dq)", "dq[...] = jnp.where(i > 0, dq[...], 0.0)", {}),
    "bwd: keys past the end": (
        BWD,
        "if keys and blocks.uneven_kv:\n            k",
        "if False:\n            k",
        {},
    ),
    "bwd: a tile past the end unmasked": (BWD, "<= blocks.keys_left(j), cut, 0)", "<= blocks.kv_len, cut, 0)", FULL),
    "bwd: keys past the end seen": (BWD, "if keys and blocks.uneven_kv and not blocks.causal:", "if False:", FULL),
    "bwd: dq of the unmasked": (
        BWD,
        "weights, change = (jnp.where(mask, x, 0.0) for x in (weights, change))",
        "weights = jnp.where(mask, weights, 0.0)",
        {},
    ),
    "bwd: heads of another group": (
        BWD,
        "return b, h * group + g, i",
        "return b, g * kv_heads + h, i",
        {"heads": 4, "kv_heads": 2},
    ),
}
QUICK = {"dq: delta left out", "dkv: last head of the group only", "dkv: mask one less", "bwd: dq of all blocks"}


@pytest.mark.parametrize(
    ("which", "old", "new", "fields"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in WRONG.items()],
)
def test_wrong_texts_are_rejected(monkeypatch, which, old, new, fields):
    kernel, function = which
    rewrite(monkeypatch, (tiles, backward_tiles, backward), function, old, new)
    verdict = validate(kernel, *instance(kernel, fields, TILES))
    assert verdict.status in REJECTED, verdict


def test_what_training_asks_of_the_forward_kernel_besides_comes_on_top_of_the_limit_that_it_was_tuned_under():
    q, k, v = arrays(2048, 2048, heads=1, kv_heads=1, dim=128, v_dim=128, dtype="bfloat16")
    config = {"block_q": 2048, "block_kv": 2048, "vmem_limit_mib": 16}

    def limits(function) -> set[str]:
        return set(re.findall(r"vmem_limit_bytes=(\d+)", str(jax.make_jaxpr(function)(q, k, v))))

    op = functools.partial(attention, config=config, bwd_config={**BLOCKS, "vmem_limit_mib": 32})
    assert limits(op) == {str(16 * 2**20)}
    # Two buffers of 2048 rows of 128 lanes of float32.
    assert limits(lambda *x: jax.vjp(op, *x)[0]) == {str(18 * 2**20)}

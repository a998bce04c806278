"""Validation passes right kernels and rejects every kind of wrong one."""

import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.outcome import Status
from autotune.validation import TOLERANCES, Validation, compare, validate
from kernels.attention import pallas as flash
from kernels.attention import tiles
from kernels.matmul import pallas as tiled
from search_spaces.attention import AttentionKernel
from search_spaces.matmul import MatmulKernel

NAN_MEMORY = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")

MATMUL = MatmulKernel.problem_type(m=4096, n=4096, k=4096, dtype="float32")
TILES = {"block_m": 64, "block_n": 128, "block_k": 128}
ATTENTION = AttentionKernel.problem_type(
    batch=1, heads=4, kv_heads=2, q_len=4096, kv_len=4096, head_dim=64, dtype="bfloat16"
)
BLOCKS = {"block_q": 128, "block_kv": 256, "block_q_compute": 64, "block_kv_compute": 128, "unroll": 1}


class Wrapped(MatmulKernel):
    """The matmul with something done to it."""

    def __init__(self, change):
        self.change = change

    def bind(self, problem, config, *, interpret=False):
        run = super().bind(problem, config, interpret=interpret)
        return lambda x, y: self.change(run, x, y)


def raises(*_):
    raise ValueError("block shapes that Pallas refuses")


def instance(kernel, problem, config):
    """The kernel's problem and config of these tests, with these changes."""
    base, blocks = (MATMUL, TILES) if isinstance(kernel, MatmulKernel) else (ATTENTION, BLOCKS)
    return base.replace(problem), {**blocks, **config}


def rewrite(monkeypatch, modules, function, old, new):
    """Puts `function` of a module's text, with `old` made `new`, in its place.

    Args:
        modules: The module; or several, of which the later ones import from the earlier and the last has the function.
    """
    modules = modules if isinstance(modules, tuple) else (modules,)
    texts = [inspect.getsource(module) for module in modules]
    assert sum(text.count(old) for text in texts) == 1, f"{old!r} must be once in {modules}"
    with monkeypatch.context() as importing:
        for module, text in zip(modules, texts, strict=True):
            changed = types.ModuleType(module.__name__)
            importing.setitem(sys.modules, module.__name__, changed)
            exec(compile(text.replace(old, new), module.__file__, "exec"), changed.__dict__)
    monkeypatch.setattr(modules[-1], function, getattr(changed, function))


# Kernel, changes to its problem and to its config: something of everything a space may hold.
RIGHT = [
    (MatmulKernel(), {}, {}),
    pytest.param(
        MatmulKernel(),
        {"dtype": "bfloat16", "k": 200},
        {"block_k": 200, "grid_order": "nm", "held_buffers": 1},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        MatmulKernel(), {"m": 1001, "n": 70, "k": 777, "dtype": "bfloat16"}, {"block_n": 70}, marks=pytest.mark.slow
    ),
    (AttentionKernel(), {}, {}),
    pytest.param(
        AttentionKernel(),
        {"dtype": "float32", "causal": False},
        {"row_sum": "mxu", "unroll": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        AttentionKernel(),
        {"batch": 3, "heads": 6, "q_len": 200, "head_dim": 128},
        {"row_sum": "mxu"},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        AttentionKernel(),
        {"heads": 8, "kv_heads": 1, "q_len": 1001, "kv_len": 1001, "dtype": "float32"},
        {"unroll": 2},
        marks=pytest.mark.slow,
    ),
    (AttentionKernel(), {"window": 300, "soft_cap": 5.0, "packed": True, "v_head_dim": 128}, {"unroll": 2}),
    pytest.param(AttentionKernel(), {"window": 1024}, {"row_sum": "mxu"}, marks=pytest.mark.slow),
    pytest.param(
        AttentionKernel(), {"packed": True, "causal": False, "q_len": 1001, "kv_len": 900}, {}, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("kernel", "problem", "config"), RIGHT)
def test_right_kernels_pass(kernel, problem, config):
    verdict = validate(kernel, *instance(kernel, problem, config))
    assert verdict.ok, verdict.message
    assert 0 < verdict.max_rel_error < verdict.tolerance
    assert verdict.max_element_error > 0
    assert len(verdict.problems) >= 2
    assert Validation.from_dict(verdict.to_dict()) == verdict


REJECTED = (Status.WRONG_RESULT, Status.RUNTIME_ERROR)  # the interpreter itself refuses what comes back to a block
# What is done to the kernel's text, then where it matters: changes to the problem and to the config.
ADD = "        acc_ref[...] += dot(x_ref[...], y_ref[...], **transposed)\n\n    @pl"
X, Y, OUT = "i, j, step: (i, step)", "i, j, step: (step, j)", "i, j, step: (i, j)"
WRONG_MATMULS = {
    "first two k steps": (ADD, ADD.replace("dot(", "(step < 2) * dot("), {}, {}),
    "last k step skipped": (ADD, ADD.replace("dot(", "(step < steps - 1) * dot("), {}, {}),
    "first two blocks of m": (X, "i, j, step: (i % 2, step)", {}, {}),
    "first two blocks of n": (Y, "i, j, step: (step, j % 2)", {}, {}),
    "first two blocks of n, whole k": (Y, "i, j, step: (step, j % 2)", {"k": 128}, {}),
    "first two blocks of k": (Y, "i, j, step: (step % 2, j)", {}, {}),
    "first two blocks of the result": (OUT, "i, j, step: (jnp.minimum(i, 1), j)", {}, {}),
    "tail ignored": ("tail=k % block_k", "tail=0", {}, {}),
    "sum rounded": (ADD, ADD.replace("transposed)", "transposed).astype(jnp.bfloat16)"), {}, {}),
}
FULL, UNROLL = {"causal": False}, {"unroll": 2}
KV_BLOCKS, END = "first, last = 0, blocks.kv_blocks - 1", "    return first, clear, cut, end\n\n\ndef query_tiles"
WINDOW, CAP, PACKED = {"window": 200}, {"soft_cap": 2.0}, {"packed": True}
WRONG_ATTENTIONS = {
    "first two kv blocks": (KV_BLOCKS, "first, last = 0, min(1, blocks.kv_blocks - 1)", FULL, {}),
    "first two kv blocks, causal": (KV_BLOCKS, "first, last = 0, min(1, blocks.kv_blocks - 1)", {}, {}),
    "last kv block skipped": (KV_BLOCKS, "first, last = 0, max(0, blocks.kv_blocks - 2)", FULL, {}),
    "first two q blocks": ("step: (b, h, i, 0))", "step: (b, h, jnp.minimum(i, 1), 0))", {}, {}),
    "first sequence's keys": ("return b, lax.div(h, group)", "return 0, lax.div(h, group)", {"batch": 2}, {}),
    "groups of two": ("lax.div(h, group)", "lax.div(h, 2)", {"heads": 8}, {}),
    "heads dealt out": ("lax.div(h, group)", "lax.rem(h, kv_heads)", {}, {}),
    "mask one less": ("key - query <= shift", "key - query < shift", {}, {}),
    "mask one more": ("key - query <= shift", "key - query <= shift + 1", {}, {}),
    "a key past the end": ("key < blocks.keys_left", "key <= blocks.keys_left", FULL, {}),
    "values past the end": (
        "if blocks.uneven_kv:\n                    values",
        "if False:\n                    values",
        FULL,
        {},
    ),
    "a cut tile unmasked": (END, END.replace("cut,", "jnp.minimum(cut + 1, end),"), {}, {}),
    "a cut tile unmasked, full": (END, END.replace("cut,", "jnp.minimum(cut + 1, end),"), FULL, {}),
    "a seen tile skipped": (END, END.replace("cut, end", "jnp.minimum(cut, end - 1), end - 1"), {}, {}),
    "a seen tile skipped, full": (END, END.replace("cut, end", "jnp.minimum(cut, end - 1), end - 1"), FULL, {}),
    "unroll's rest skipped": ("if unroll > 1:", "if False:", {}, UNROLL),
    "unroll's rest skipped, full": ("if unroll > 1:", "if False:", FULL, UNROLL),
    "unroll's rest twice": ("fori_loop(clear + groups * unroll,", "fori_loop(groups * unroll - 1,", {}, UNROLL),
    "one row tile short": (
        "fori_loop(0, row_tiles(blocks, i), row",
        "fori_loop(0, row_tiles(blocks, i) - 1, row",
        {},
        {},
    ),
    "edge's row tile skipped": ("left + blocks.block_q_compute - 1", "left", {}, {}),
    "row sum's column": ("acc[:, v_dim : v_dim + 1]", "acc[:, v_dim - 1 : v_dim]", {}, {"row_sum": "mxu"}),
    "row sum not cleared": ("sums[...] = jnp.zeros_like(sums)", "sums[...] = sums[...]", {}, {}),
    "sum not faded": ("sums[rows, :] * fade", "sums[rows, :]", {}, {}),
    "values not faded": ("acc[rows, :] * across(fade, acc.shape[1])", "acc[rows, :]", {}, {}),
    "scale off by 1%": ("else self.scale * LOG2E", "else self.scale * 1.01 * LOG2E", {}, {}),
    "window one less": ("shift - blocks.window)", "shift - blocks.window + 1)", WINDOW, {}),
    "window one more": ("> shift - blocks.window)", ">= shift - blocks.window)", WINDOW, {}),
    "window's edge unmasked": (
        "shift + rows - blocks.window, 0) + width - 1",
        "shift + rows - blocks.window, 0)",
        WINDOW,
        {},
    ),
    "window's first tile skipped": (
        "first = lax.div(jnp.maximum(shift + 1",
        "first = 1 + lax.div(jnp.maximum(shift + 1",
        WINDOW,
        {},
    ),
    "window's first block skipped": (
        "blocks.first_key(i), 0)",
        "blocks.first_key(i) + blocks.block_kv, 0)",
        {"window": 512},
        {},
    ),
    "cap left out": ("bent = jnp.tanh(products)", "bent = products", CAP, {}),
    "cap off by 2%": ("bent * (self.soft_cap * LOG2E)", "bent * (1.02 * self.soft_cap * LOG2E)", CAP, {}),
    "segments in order": ("segments[0] == segments[1]", "segments[0] <= segments[1]", PACKED, {}),
    "a mean where no key is seen": ("out = jnp.where(row_max[:, :1] == MASKED, 0.0, out)", "pass", PACKED, {}),
    "segments ignored": ("if segments is not None:", "if False:", PACKED, {}),
    "first block's segments": ("(b, 0, kv_index(b, h, i, step)[2])", "(b, 0, 0)", PACKED, {}),
    "first queries' segments": ("lambda b, h, i, step: (b, 0, i))", "lambda b, h, i, step: (b, 0, 0))", PACKED, {}),
}
# Of a kind with others: left to the slow run.
SLOW = {
    "first sequence's keys",
    "groups of two",
    "last k step skipped",
    "first two blocks of n, whole k",
    "first two blocks of k",
    "tail ignored",
    "first two kv blocks, causal",
    "first two q blocks",
    "heads dealt out",
    "a key past the end",
    "a cut tile unmasked, full",
    "a seen tile skipped, full",
    "unroll's rest skipped",
    "unroll's rest twice",
    "edge's row tile skipped",
    "row sum not cleared",
    "sum not faded",
    "mask one less",
    "window one less",
    "window's edge unmasked",
    "window's first tile skipped",
    "window's first block skipped",
    "cap off by 2%",
    "first block's segments",
    "segments ignored",
    "segments in order",
}


def cases(wrong):
    return [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in wrong.items()]


@pytest.mark.parametrize(("old", "new", "problem", "config"), cases(WRONG_MATMULS))
def test_wrong_texts_of_the_matmul_are_rejected(monkeypatch, old, new, problem, config):
    rewrite(monkeypatch, tiled, "matmul_pallas", old, new)
    verdict = validate(MatmulKernel(), *instance(MatmulKernel(), problem, config))
    assert verdict.status in REJECTED, verdict


@pytest.mark.parametrize(("old", "new", "problem", "config"), cases(WRONG_ATTENTIONS))
def test_wrong_texts_of_attention_are_rejected(monkeypatch, old, new, problem, config):
    rewrite(monkeypatch, (tiles, flash), "attention_pallas", old, new)
    verdict = validate(AttentionKernel(), *instance(AttentionKernel(), problem, config))
    assert verdict.status in REJECTED, verdict


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda run, x, y: jnp.zeros_like(run(x, y)), Status.WRONG_RESULT),
        (lambda run, x, y: run(x[:, :-128], y[:-128]), Status.WRONG_RESULT),  # skips the last block
        (lambda run, x, y: run(x, y).at[-1, -1].set(jnp.nan), Status.WRONG_RESULT),
        (lambda run, x, y: run(x, y).at[-1, -1].add(0.1), Status.WRONG_RESULT),  # one wrong element
        (lambda run, x, y: jnp.roll(run(x, y), 128, 1), Status.WRONG_RESULT),  # tiles mixed up
        (lambda run, x, y: run(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)), Status.WRONG_RESULT),
        (lambda run, x, y: run(x, y)[:-1], Status.WRONG_RESULT),
        (raises, Status.LOWERING_ERROR),
        (lambda run, x, y: jax.pure_callback(raises, x, x), Status.RUNTIME_ERROR),
    ],
)
def test_wrong_matmuls_are_rejected(change, status):
    verdict = validate(Wrapped(change), MATMUL, TILES)
    assert verdict.status is status, verdict
    assert "m=" in verdict.message


def test_an_output_tile_that_nobody_writes_is_rejected():
    def unwritten_edge(run, x, y):
        def kernel(x_ref, out_ref):
            pl.when(pl.program_id(0) < pl.num_programs(0) - 1)(lambda: out_ref.__setitem__(..., x_ref[...]))

        out = run(x, y)
        spec = pl.BlockSpec((64, out.shape[1]), lambda i: (i, 0))
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
            grid=(pl.cdiv(out.shape[0], 64),),
            in_specs=[spec],
            out_specs=spec,
            interpret=NAN_MEMORY,
        )
        return call(out)

    assert validate(Wrapped(unwritten_edge), MATMUL, TILES).status is Status.WRONG_RESULT


def test_heads_that_take_the_wrong_kv_head_are_rejected(monkeypatch):
    class Shuffled(AttentionKernel):
        def bind(self, problem, config, *, interpret=False):
            run = super().bind(problem, config, interpret=interpret)
            return lambda q, k, v: run(q, k[:, ::-1], v[:, ::-1])

    assert validate(Shuffled(), ATTENTION, BLOCKS).status is Status.WRONG_RESULT


@pytest.mark.parametrize(
    ("want", "says"),
    [
        (np.zeros((4, 4)), "zeros would pass"),
        (np.full((4, 4), 3.0), "a constant would pass"),
        (np.broadcast_to([[1.0, 2.0, 3.0]], (4, 3)), "shifted by one along axis 0 would pass"),
        (np.full((2, 2), np.nan), "anything would pass"),
    ],
)
def test_a_comparison_that_shows_nothing_says_so(want, says):
    want = np.asarray(want, np.float32)
    verdict = compare(want, want, TOLERANCES["float32"], "here")
    assert not verdict.ok
    assert says in verdict.message


def test_a_kernel_without_problems_is_not_validated():
    class Silent(MatmulKernel):
        def validation_problems(self, problem, config):
            return []

    assert validate(Silent(), MATMUL, TILES).status is Status.RUNTIME_ERROR

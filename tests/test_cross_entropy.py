"""Cross-entropy, forward and backward: numerics on ragged shapes, its public function, spaces, and wrong kernels."""

import functools
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from autotune.chips import CHIPS, MIB
from autotune.errors import UsageError
from autotune.kernel import get_kernel
from autotune.problem import DTYPE_BYTES
from autotune.validation import validate
from kernels._tpu_model import round_up
from kernels.cross_entropy import PROBLEMS, backward, cross_entropy, pallas
from kernels.cross_entropy.problem import CrossEntropyProblem
from search_spaces.cross_entropy import CrossEntropyDwKernel, CrossEntropyDxKernel, CrossEntropyKernel
from tests.test_spaces import compile_all
from tests.test_validation import NAN_MEMORY, REJECTED, rewrite

KERNELS = {kernel.name: kernel for kernel in (CrossEntropyKernel(), CrossEntropyDxKernel(), CrossEntropyDwKernel())}
FORWARD, DX, DW = KERNELS
BLOCKS = {"block_m": 128, "block_n": 128}
IGNORE = -100


def operands(tokens: int, hidden: int, vocab: int, dtype: str = "float32") -> list[jax.Array]:
    """x, w, labels (some ignored, some in the last columns) and a gradient of the losses."""
    keys = jax.random.split(jax.random.key(tokens + hidden + vocab), 4)
    x = 2 * jax.random.normal(keys[0], (tokens, hidden))
    w = jax.random.normal(keys[1], (hidden, vocab)) * hidden**-0.5
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
    labels = jnp.where(jnp.arange(tokens) % 5 == 2, IGNORE, jnp.where(jnp.arange(tokens) % 3 == 0, vocab - 1, labels))
    return [x.astype(dtype), w.astype(dtype), labels, jax.random.normal(keys[3], (tokens,))]


def plain(x, w, labels, grad, z_loss: float = 0.0, soft_cap: float | None = None) -> list[np.ndarray]:
    """Losses and the gradients of x and w in float64, from the definition."""
    x, w, grad = (np.asarray(array, np.float64) for array in (x, w, grad))
    labels = np.asarray(labels)
    kept, rows = labels != IGNORE, np.arange(len(labels))
    logits, slope = x @ w, 1.0
    if soft_cap:
        logits, slope = soft_cap * np.tanh(logits / soft_cap), 1 / np.cosh(logits / soft_cap) ** 2
    top = logits.max(1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
    losses = np.where(kept, lse - logits[rows, labels * kept] + z_loss * lse**2, 0)
    by_logits = np.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None]
    by_logits[rows, labels * kept] -= 1
    by_logits *= (grad * kept)[:, None] * slope
    return [losses, by_logits @ w.T, x.T @ by_logits]


def assert_close(got, want, dtype, subtracted: float = 0.0) -> None:
    """Close for the size of what was added up: `want`, and what was `subtracted` on the way to it (its norm)."""
    got = np.asarray(got, np.float64)
    tolerance = 1e-5 if dtype == "float32" else 2**-6
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * (np.linalg.norm(want) + subtracted) + 1e-6


def label_sizes(x, w, grad) -> list[float]:
    """About the norm of what a label takes off the loss and off each gradient: all of it, where one word has it all."""
    x, w, grad = (np.asarray(array, np.float64) for array in (x, w, grad))
    column, row = np.linalg.norm(w) / np.sqrt(w.shape[1]), np.linalg.norm(x) / np.sqrt(len(x))
    return [row * column, np.linalg.norm(grad) * column, np.linalg.norm(grad) * row]


SHAPES = {
    "tokens": st.integers(1, 300),
    "hidden": st.integers(1, 300),
    "vocab": st.integers(1, 600),
    "z_loss": st.sampled_from([0.0, 0.03]),
    "soft_cap": st.sampled_from([None, 3.0]),
    "tied": st.booleans(),
    "whole": st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
}


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(**SHAPES)
@example(tokens=128, hidden=128, vocab=256, z_loss=0.0, soft_cap=None, tied=True, whole=True, dtype="bfloat16")
@example(tokens=225, hidden=30, vocab=1, z_loss=0.0, soft_cap=None, tied=True, whole=False, dtype="float32")
def test_any_shape_is_right_forward_and_backward_with_nan_memory(**shape):
    check_against_the_definition(**shape)


@settings(deadline=None, phases=[Phase.explicit])
@given(**SHAPES)
@example(tokens=130, hidden=200, vocab=315, z_loss=0.03, soft_cap=3.0, tied=False, whole=False, dtype="float32")
@example(tokens=129, hidden=40, vocab=129, z_loss=0.0, soft_cap=None, tied=True, whole=True, dtype="bfloat16")
def test_these_shapes_are_right_forward_and_backward_with_nan_memory(**shape):
    check_against_the_definition(**shape)


def check_against_the_definition(tokens, hidden, vocab, z_loss, soft_cap, tied, whole, dtype):
    """Losses and gradients by the kernels, blocks of 128 and more. `whole`: hidden in one block, and other options."""
    x, w, labels, grad = operands(tokens, hidden, vocab, dtype)
    wide = {"block_m": 128, "block_n": 256}
    op = functools.partial(
        cross_entropy,
        z_loss=z_loss,
        soft_cap=soft_cap,
        tied=tied,
        config={**wide, "block_k": None if whole else 128, "block_n_compute": 128, "held_buffers": 1 + whole},
        dx_config={**wide, "block_n_compute": 128 * (1 + whole), "turned_sum": not tied},
        dw_config={"block_m": 256, "block_n": 128, "block_m_compute": 128, "held_buffers": 1 + whole},
        interpret=NAN_MEMORY,
    )

    @jax.jit
    def run(x, w):
        losses, gradients = jax.vjp(lambda x, w: op(x, w, labels), x, w)
        dx, dw = gradients(grad)
        return losses, dx, dw.T if tied else dw

    got = run(x, w.T if tied else w)
    assert [array.dtype for array in got] == [jnp.float32, dtype, dtype]
    wanted, subtracted = plain(x, w, labels, grad, z_loss, soft_cap), label_sizes(x, w, grad)
    for one, want, size in zip(got, wanted, subtracted, strict=True):
        assert_close(one, want, dtype, size)
    assert not np.any(np.asarray(got[0])[np.asarray(labels) == IGNORE])
    assert not np.any(np.asarray(got[1], np.float32)[np.asarray(labels) == IGNORE])


def test_large_logits_do_not_overflow():
    x, w, labels, grad = operands(20, 64, 200)
    want = plain(300 * x, w, labels, grad)[0]
    for interpret in (True, False):
        assert_close(cross_entropy(300 * x, w, labels, config=BLOCKS, interpret=interpret), want, "float32")


def test_runs_where_there_is_no_tpu_under_jit_with_leading_dimensions():
    x, w, labels, grad = operands(6, 5, 7)
    labels = jnp.where(labels == IGNORE, 99, labels)

    @jax.jit
    def gradients(x, w):
        def total(x, w):
            losses = cross_entropy(x, w, labels.reshape(2, 3).astype(jnp.int16), z_loss=0.1, ignore_index=99)
            return jnp.sum(losses * grad.reshape(2, 3))

        return jax.grad(total, argnums=(0, 1))(x, w)

    dx, dw = gradients(x.reshape(2, 3, 5), w)
    _, want_dx, want_dw = plain(x, w, jnp.where(labels == 99, IGNORE, labels), grad, 0.1)
    assert_close(dx.reshape(6, 5), want_dx, "float32")
    assert_close(dw, want_dw, "float32")


def test_programs_for_a_tpu_hold_no_logits():
    """Neither forward nor backward: nothing of tokens x vocab elements is in the program."""
    x, w, labels, _ = operands(128, 128, 640)
    loss = jax.jit(jax.grad(lambda x, w: jnp.sum(cross_entropy(x, w, labels)), argnums=(0, 1)))
    text = loss.trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 3
    assert "128x640x" in text.replace("tensor<", "")  # w itself
    x, w, labels, _ = operands(256, 128, 640)
    assert "256x640x" not in loss.trace(x, w).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.slow
def test_no_two_steps_race():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    x, w, labels, grad = operands(130, 128, 200)
    params = pltpu.InterpretParams(detect_races=True)
    options = {"config": BLOCKS, "dx_config": BLOCKS, "dw_config": BLOCKS, "interpret": params}
    jax.block_until_ready(jax.grad(lambda x: jnp.sum(cross_entropy(x, w, labels, **options) * grad))(x))
    races = interpreter.get_races() if hasattr(interpreter, "get_races") else interpreter.races
    assert not races.races_found


@pytest.mark.parametrize(
    ("x", "w", "labels"),
    [
        ((4, 5), (6, 7), (4,)),
        ((5,), (5, 7), ()),
        ((4, 5), (5,), (4,)),
        ((4, 5), (5, 7), (5,)),
        ((4, 5), (5, 7), (4, 1)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, w, labels):
    with pytest.raises(UsageError, match=r"must be \[\.\.\., tokens, hidden\], \[hidden, vocab\] and"):
        cross_entropy(jnp.ones(x), jnp.ones(w), jnp.ones(labels, jnp.int32))


def test_dtypes_and_z_losses_that_do_not_fit_are_refused():
    x, labels = jnp.ones((4, 4)), jnp.ones(4, jnp.int32)
    with pytest.raises(UsageError, match="must both be bfloat16 or float32"):
        cross_entropy(x, x.astype(jnp.bfloat16), labels)
    with pytest.raises(UsageError, match="labels integers"):
        cross_entropy(x, x, labels.astype(jnp.float32))
    with pytest.raises(UsageError, match="must be a finite number of at least 0"):
        cross_entropy(x, x, labels, z_loss=-1.0)
    with pytest.raises(UsageError, match=r"soft_cap=0\.0: must be a positive number, or none"):
        cross_entropy(x, x, labels, soft_cap=0.0)
    with pytest.raises(UsageError, match=r"\[vocab, hidden\] \(tied\)"):
        cross_entropy(x, jnp.ones((4, 5)), labels, tied=True)
    with pytest.raises(UsageError, match="dtype=int8: must be"):
        cross_entropy(x.astype(jnp.int8), x.astype(jnp.int8), labels)


# Validation. The kernel's text changed, then the kernel, the problem and the config on which it matters.


TIED, CAPPED = {"tied": True}, {"soft_cap": 30.0}


def instance(kernel, problem=None, config=None):
    small = kernel.parse_problem("tokens=4000,hidden=200,vocab=5003,dtype=float32").replace(problem or {})
    return small, kernel.space(small, CHIPS["v5e"]).parse({**BLOCKS, **(config or {})})


@pytest.mark.parametrize(
    ("name", "problem", "config"),
    [
        (DW, {"z_loss": 1e-4, "soft_cap": 30.0}, {"held_buffers": 1}),
        pytest.param(FORWARD, {"dtype": "bfloat16", "z_loss": 1e-4}, {"block_k": 128}, marks=pytest.mark.slow),
        pytest.param(DX, {"dtype": "bfloat16"}, {"turned_sum": True}, marks=pytest.mark.slow),
        pytest.param(DW, {"z_loss": 1e-4}, {"block_m": 256, "block_m_compute": 128}, marks=pytest.mark.slow),
        pytest.param(FORWARD, {**TIED, **CAPPED}, {"block_k": 128}, marks=pytest.mark.slow),
        pytest.param(DX, {**TIED, **CAPPED}, {}, marks=pytest.mark.slow),
        pytest.param(DW, TIED, {}, marks=pytest.mark.slow),
        pytest.param(FORWARD, {"tokens": 70}, {"block_n": 512, "block_n_compute": 256}, marks=pytest.mark.slow),
        pytest.param(DX, {"z_loss": 1e-4}, {"held_buffers": 1}, marks=pytest.mark.slow),
        pytest.param(DW, {"dtype": "bfloat16", "hidden": 4096}, {"held_buffers": 1}, marks=pytest.mark.slow),
    ],
)
def test_right_kernels_pass(name, problem, config):
    verdict = validate(KERNELS[name], *instance(KERNELS[name], problem, config))
    assert verdict.ok, verdict.message
    assert 0 < verdict.max_rel_error < verdict.tolerance


Z, DEEP = {"z_loss": 1e-4}, {"block_k": 128}
TILES = {"block_n": 256, "block_n_compute": 128}
HIT, LAST = "j * block_n + first + number * LANES", "pl.when(last_step & (j == blocks - 1))(lambda: update(tail))"
WRONG = {
    "tail not masked": ("if columns - first < width:", "if False:", FORWARD, {}, {}),
    "mask one more": ("column < columns - first", "column <= columns - first", FORWARD, {}, {}),
    "mask one less": ("column < columns - first", "column < columns - first - 1", FORWARD, {}, {}),
    "last block skipped": (LAST, "pass", FORWARD, {}, {}),
    "sum not rescaled": ("total[...] * jnp.exp2(before - now)", "total[...]", FORWARD, {}, {}),
    "maximum of the last block alone": ("jnp.maximum, chunks, before", "jnp.maximum, chunks", FORWARD, {}, {}),
    "sum of the last tile": (", total[...] * jnp.exp2(before - now)", ", 0.0 * before", FORWARD, {}, {}),
    "natural exponentials": ("sum((jnp.exp2(chunk - now)", "sum((jnp.exp(chunk - now)", FORWARD, {}, {}),
    "statistics kept for the next tokens": (
        "(j == 0) & (step == 0)", "(pl.program_id(0) == 0) & (j == 0) & (step == 0)", FORWARD, {}, {}
    ),
    "lanes added as they are": ("total[rows] * jnp.exp2(top[rows] - largest)", "total[rows]", FORWARD, {}, {}),
    "label one column on": (HIT, HIT + " + 1", FORWARD, {}, {}),
    "label of the first block": (HIT, HIT.replace("j * block_n + ", ""), FORWARD, {}, {}),
    "label of the first tile": (HIT, HIT.replace("first + ", ""), FORWARD, {}, TILES),
    "labels counted, not ignored": ("labels_ref[:, rows] >= 0", "labels_ref[:, rows] >= -1", FORWARD, {}, {}),
    "first label ignored": ("labels_ref[:, rows] >= 0", "labels_ref[:, rows] > 0", FORWARD, {}, {}),
    "z-loss left out": ("if z_loss else lse - label", "if False else lse - label", FORWARD, Z, {}),
    "z-loss not squared": ("z_loss * lse * lse", "z_loss * lse", FORWARD, Z, {}),
    "last hidden part for the first": (
        "x = x_ref[:, (steps - 1) * block_k :]", "x = x_ref[:, :tail_k]", FORWARD, {"hidden": 300}, DEEP
    ),
    "sums not reset": ("step == 0, 0.0", "step < 0, 0.0", FORWARD, {"hidden": 384}, DEEP),
    "first tokens' x": ("lambda i, j, k: (i, 0)", "lambda i, j, k: (i % 2, 0)", FORWARD, {}, {}),
    "dx: last block skipped": ("pl.when(j == blocks - 1)(lambda: update(tail))", "pass", DX, {}, {}),
    "dx: tail not cut": ("pl.when(j == blocks - 1)(lambda: update(tail))",
                         "pl.when(j == blocks - 1)(lambda: update(block_n))", DX, {}, {}),
    "dx: label not taken off": ("place[each] == j", "place[each] == -1 - j", DX, {}, {}),
    "dx: label of the first tile": ("j * block_n + first + start", "j * block_n + start", DX, {}, TILES),
    "dx: kept for the next tokens": ("pl.when(j == 0)", "pl.when((j == 0) & (pl.program_id(0) == 0))", DX, {}, {}),
    "dx: one block's": ("acc[...] += dot(by_logits", "acc[...] = dot(by_logits", DX, TIED, {}),
    "dx: z-loss left out": ("if z_loss else of_label), of_label", "if False else of_label), of_label", DX, Z, {}),
    "dx: z-loss not doubled": ("1 + 2 * z_loss * lse", "1 + z_loss * lse", DX, Z, {}),
    "dx: ignored tokens counted": ("labels >= 0, grad, 0.0", "labels >= -1, grad, 0.0", DX, {}, {}),
    "dx: rounded gradient": ("lse) * of_softmax", "lse).astype(jnp.bfloat16) * of_softmax", DX, {}, {}),
    "dx: slope left out": ("by_logits if slope is None else by_logits * slope", "by_logits", DX, CAPPED, {}),
    "dw: slope squared": ("else by_logits * slope", "else by_logits * slope * slope", DW, CAPPED, {}),
    "not capped": ("capped(logits, soft_cap)[0]", "capped(logits, None)[0]", FORWARD, CAPPED, {}),
    "dw: tied, x for w": ("w_rows = w_ref if tied", "w_rows = x_ref if tied", DW, TIED, {}),
    "dw: last tokens skipped": ("pl.when(i == blocks - 1)(lambda: update(tail))", "pass", DW, {}, {}),
    "dw: tail not cut": ("pl.when(i == blocks - 1)(lambda: update(tail))",
                         "pl.when(i == blocks - 1)(lambda: update(block_m))", DW, {}, {}),
    "dw: kept for the next columns": ("pl.when(i == 0)", "pl.when((i == 0) & (j == 0))", DW, {}, {}),
    "dw: label of the first block": ("labels - j * block_n", "labels", DW, {}, {}),
    "dw: softmax left out": ("weights - of_label, weights", "-of_label, 0.0", DW, {}, {}),
    "dw: one block's": ("acc[...] += dot(jnp", "acc[...] = dot(jnp", DW, {}, {}),
    "dw: ignored tokens counted": ("labels >= 0, grad, 0.0", "labels >= -1, grad, 0.0", DW, {}, {}),
    "dw: log-sum-exp of the first block": ("lambda j, i: (0, i)", "lambda j, i: (0, 0)", DW, {}, {}),
}  # fmt: skip
QUICK = {
    "mask one less",
    "sum not rescaled",
    "statistics kept for the next tokens",
    "dx: tail not cut",
    "dx: ignored tokens counted",
    "dw: kept for the next columns",
}


@pytest.mark.parametrize(
    ("old", "new", "name", "problem", "config"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in WRONG.items()],
)
def test_wrong_texts_are_rejected(monkeypatch, old, new, name, problem, config):
    rewrite(monkeypatch, pallas if name == FORWARD else backward, f"{name}_pallas", old, new)
    verdict = validate(KERNELS[name], *instance(KERNELS[name], problem, config))
    assert verdict.status in REJECTED, verdict


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("text", ["", "dtype=float32", "tokens=1001,hidden=5003,vocab=777", "gpt2,z_loss=1e-4"])
def test_validation_has_all_that_the_problem_has_in_reach_of_a_cpu(name, text):
    kernel = KERNELS[name]
    problem = kernel.parse_problem(text)
    for config in random.Random(1).sample(list(kernel.space(problem, CHIPS["v5e"])), 20):
        smalls = kernel.validation_problems(problem, config)
        blocks = {"tokens": config["block_m"], "vocab": config["block_n"]}
        if config.get("block_k", problem.hidden) < problem.hidden:
            blocks["hidden"] = config["block_k"]
        for field, block in blocks.items():
            size, lengths = getattr(problem, field), [getattr(small, field) for small in smalls]
            assert any(length > 2 * block and length % block for length in lengths), "three blocks and an uneven edge"
            assert any(n % block == size % block and n >= min(size, 2 * block) for n in lengths), "the problem's edge"
        for small in smalls:
            assert (small.dtype, small.tied) == (problem.dtype, problem.tied)
            assert (bool(small.z_loss), bool(small.soft_cap)) == (bool(problem.z_loss), bool(problem.soft_cap))
            assert kernel.cost(small).flops < 4e11
            assert sum(spec.nbytes for spec in kernel.arguments(small)) < 512 * MIB


# The spaces and the costs.


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_are_registered(name):
    assert type(get_kernel(name)) is type(KERNELS[name])
    assert len(KERNELS[name].version) == 12
    problem = PROBLEMS["qwen3-8b-1k"]
    assert (problem.tokens, problem.hidden, problem.vocab) == (1024, 4096, 151936)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_spaces_hold_baseline_and_heuristic_of_every_named_problem(name, chip):
    kernel = KERNELS[name]
    for problem in PROBLEMS.values():
        space = kernel.space(problem, chip)
        assert 8 < space.size <= space.cardinality < 20_000
        baseline, heuristic = kernel.baselines(problem, chip)["default"], kernel.heuristic(problem, chip)
        assert {baseline["block_m"], baseline["block_n"]} == {128}
        for config in (baseline, heuristic):
            assert space.why_invalid(config) is None
            assert kernel.estimate_ms(problem, config, chip) >= 0.99 * kernel.cost(problem).roofline_ms(chip)
        assert kernel.estimate_ms(problem, heuristic, chip) <= kernel.estimate_ms(problem, baseline, chip)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 10_000) | st.just(2**31 - 1),
    hidden=st.integers(1, 8192),
    vocab=st.integers(1, 300_000) | st.just(2**31 - 1),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    name=st.sampled_from(list(KERNELS)),
)
def test_heuristics_are_valid_on_every_chip_or_refuse_what_has_no_room(tokens, hidden, vocab, dtype, name):
    kernel, problem = KERNELS[name], CrossEntropyProblem(tokens=tokens, hidden=hidden, vocab=vocab, dtype=dtype)
    for chip in CHIPS.values():
        space = kernel.space(problem, chip)
        if chip.name == "v4" and name != FORWARD and round_up(hidden, 128) * DTYPE_BYTES[dtype] > 14336:
            with pytest.raises(UsageError, match=f"hidden={hidden} in {dtype} leave no room in the 16 MiB of VMEM of"):
                kernel.heuristic(problem, chip)
            continue
        heuristic = kernel.heuristic(problem, chip)
        assert space.why_invalid(heuristic) is None
        assert kernel.estimate_ms(problem, heuristic, chip) >= 0.99 * kernel.cost(problem).roofline_ms(chip)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "cases"),
    [
        ("v4", [(FORWARD, "hidden=5120"), (DX, "hidden=7168,tied=true"), (DW, "hidden=3584,dtype=float32")]),
        ("v4", [(FORWARD, "hidden=8192"), (DW, "hidden=7168")]),
        ("v5e", [(FORWARD, "hidden=4096,tied=true,soft_cap=30,dtype=float32")]),
        ("v5e", [(DW, "hidden=8192,dtype=float32")]),
    ],
)
def test_heuristics_compile_where_room_is_scarce(target, cases):
    """Where no preset is, training code takes the heuristic."""
    for name, text in cases:
        problem = KERNELS[name].parse_problem(f"llama3-8b,{text}")
        assert compile_all(name, target, [(str(problem), KERNELS[name].heuristic(problem, CHIPS[target]))]) == ["ok"]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (FORWARD, {"block_m": 100}, "block_m must be a positive multiple of 128 up to 4096"),
        (FORWARD, {"block_n": 0}, "block_n must be a positive multiple of 128 up to 128256"),
        (FORWARD, {"block_k": 100}, "block_k must be a positive multiple of 128 up to hidden=4096, or the whole 4096"),
        (FORWARD, {"block_n": 384, "block_n_compute": 256}, "block_n_compute must be a positive multiple of 128 that"),
        (DW, {"block_m_compute": 0}, "block_m_compute must be a positive multiple of 128 that divides block_m"),
        (DX, {"held_buffers": 3}, "held_buffers must be 1 or 2"),
        (DX, {"block_m": 2048, "block_n": 1024, "block_n_compute": 128}, "must be of at most 3221225472"),
        (DX, {"block_m": 512}, "the blocks alone need more VMEM than vmem_limit_mib"),
    ],
)
def test_broken_constraints_are_named(name, change, says):
    kernel, chip = KERNELS[name], CHIPS["v5e"]
    problem = kernel.parse_problem(None)
    config = {**kernel.baselines(problem, chip)["default"], **change}
    assert says in kernel.space(problem, chip).why_invalid(config)


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        pytest.param(name, chip, marks=[pytest.mark.slow] * (chip != "v5e" or name != FORWARD))
        for name in KERNELS
        for chip in CHIPS
    ],
)
def test_the_compiler_takes_ragged_shapes(name, chip):
    kernel, chip, rng = KERNELS[name], CHIPS[chip], random.Random(3)
    texts = ["tokens=100,hidden=200,vocab=130", "tokens=300,hidden=333,vocab=1003,tied=true,soft_cap=30,dtype=float32"]
    configs = [(text, kernel.heuristic(kernel.parse_problem(text), chip)) for text in texts]
    configs += [(text, rng.choice(list(kernel.space(kernel.parse_problem(text), chip)))) for text in texts]
    found = compile_all(name, chip.name, configs, JAX_DEFAULT_MATMUL_PRECISION="highest")
    assert found[:2] == ["ok", "ok"]
    assert set(found) <= {"ok", "vmem"}


def test_the_compiler_takes_one_token_or_column_in_the_last_block():
    for name, text in ((DX, "tokens=130,hidden=131,vocab=129,tied=true"), (DW, "tokens=129,hidden=131,vocab=130")):
        assert compile_all(name, "v5e", [(text, BLOCKS)]) == ["ok"]


def test_problems_load_no_jax():
    script = "import sys, kernels.cross_entropy.cost, search_spaces.cross_entropy; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

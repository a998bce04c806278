"""The norms: numerics forward and backward, their public functions, spaces and cost, and what validation rejects."""

import random
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
from autotune.validation import validate
from kernels.norm import layernorm, rmsnorm
from kernels.norm import pallas as blocked
from kernels.norm.problem import NormProblem
from search_spaces.norm import LayerNormBackwardKernel, LayerNormKernel, RMSNormBackwardKernel, RMSNormKernel
from tests.test_spaces import compile_all
from tests.test_validation import NAN_MEMORY, REJECTED, rewrite

KERNELS = {k.name: k for k in (RMSNormKernel(), RMSNormBackwardKernel(), LayerNormKernel(), LayerNormBackwardKernel())}
EPS = 1e-3


def arrays(shape: tuple[int, ...], count: int, dtype: str = "float32") -> list[jax.Array]:
    """So many arrays of `shape`, their means not zero, and a weight and a bias of its last length."""
    shapes = [shape] * count + [shape[-1:]] * 2
    keys = jax.random.split(jax.random.key(sum(shape)), len(shapes))
    return [(jax.random.normal(key, s) + 0.5).astype(dtype) for key, s in zip(keys, shapes, strict=True)]


def exact(kind, x, weight, bias, grad):
    """The normed rows and their gradients (x, weight, bias) in float64."""
    x, weight, bias, grad = (np.asarray(array, np.float64) for array in (x, weight, bias, grad))
    centered = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    scale = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + EPS)
    normed, weighted = centered * scale, grad * weight
    dx = weighted - normed * (weighted * normed).mean(-1, keepdims=True)
    if kind == "layernorm":
        dx -= weighted.mean(-1, keepdims=True)
    out = normed * weight + (bias if kind == "layernorm" else 0)
    return out, scale * dx, (grad * normed).sum(0), grad.sum(0)


def close(got, want, dtype):
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    scale = np.abs(want).max() + 1
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * scale)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["rmsnorm", "layernorm"]),
    rows=st.integers(1, 70),
    d=st.integers(1, 300),
    tile=st.sampled_from([16, 32]),
    unroll=st.sampled_from([1, 3]),
    parts=st.sampled_from([1, 2]),
    residual=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_shape_is_right_forward_and_backward_with_nan_memory(kind, rows, d, tile, unroll, parts, residual, dtype):
    x, added, grad, sum_grad, weight, bias = arrays((rows, d), 4, dtype)
    params = (weight, bias) if kind == "layernorm" else (weight,)
    config = {"block_rows": 32, "block_rows_compute": tile, "unroll": unroll}
    options = {"eps": EPS, "config": config, "backward_config": {**config, "parts": parts}, "interpret": NAN_MEMORY}
    function = {"rmsnorm": rmsnorm, "layernorm": layernorm}[kind]

    @jax.jit
    def run(x, params, added, grads):
        primals = (x, params, added) if residual else (x, params)
        out, pull = jax.vjp(lambda x, params, added=None: function(x, *params, residual=added, **options), *primals)
        return out, pull(grads)

    out, (dx, dparams, *dadded) = run(x, params, added, (grad, sum_grad) if residual else grad)
    if residual:
        np.testing.assert_array_equal(out[1], x + added)
        np.testing.assert_array_equal(dadded[0], dx)
        x = x.astype(jnp.float32) + added.astype(jnp.float32)
    want, want_dx, *want_dparams = exact(kind, x, weight, bias, grad)
    normed = out[0] if residual else out
    close(normed, want, dtype)
    close(dx, want_dx + (np.asarray(sum_grad, np.float64) if residual else 0), dtype)
    for got, right in zip(dparams, want_dparams, strict=False):
        close(got, right, dtype)
    assert {array.dtype for array in (normed, dx, *dparams)} == {jnp.dtype(dtype)}


def test_vmap_and_leading_dimensions():
    """Mapped, the kernel's sums over rows start anew for each. Where there is no TPU, XLA computes the same."""
    x, residual, weight, bias = arrays((3, 2, 11, 20), 2)
    config = {"block_rows": 16, "block_rows_compute": 8}
    options = {"config": config, "backward_config": {**config, "parts": 2}}

    def run(interpret):
        def loss(x, weight, bias, residual):
            normed, total = layernorm(x, weight, bias, residual=residual, interpret=interpret, **options)
            return jnp.sum(normed * normed * total)

        gradients = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)), in_axes=(0, None, None, 0))
        return jax.tree.leaves(jax.jit(gradients)(x, weight, bias, residual))

    for got, want in zip(run(True), run(False), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_float32_weight_of_bfloat16_rows_keeps_its_dtype():
    x, weight, _ = arrays((6, 40), 1)
    x = x.astype(jnp.bfloat16)
    gradients = jax.eval_shape(jax.grad(lambda x, weight: jnp.sum(rmsnorm(x, weight)), argnums=(0, 1)), x, weight)
    assert [array.dtype for array in gradients] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize(
    ("x", "weight", "residual", "says"),
    [
        ((4, 5), (6,), None, r"must be \[\.\.\., d\] with \[d\]"),
        ((), (1,), None, "must be"),
        ((4, 5), (5,), (5,), "residual float32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, weight, residual, says):
    with pytest.raises(UsageError, match=says):
        rmsnorm(jnp.ones(x), jnp.ones(weight), residual=None if residual is None else jnp.ones(residual))


# What is done to the kernels' text, then the kernel, and changes to its problem and config.
SMALL, TILES = {"rows": 400, "d": 40, "dtype": "float32"}, {"block_rows": 16, "block_rows_compute": 8}
RESIDUAL, PARTS, PIECES = {"residual": True}, {"parts": 2}, {"write_pieces": 2}
ALL = "_each(inputs[0].shape[0] // tile_rows, unroll, tile)"
LEFT, SUM = "row < left - number * tile_rows", "ref[...] += jnp.sum("
MEAN, EVEN = "x -= jnp.mean(x, axis=1, keepdims=True)", "even=rows == parts * steps * block_rows"
WRONG = {
    "eps missing": ("+ eps)", ")", "rmsnorm", {}, {}),
    "eps missing, backward": ("+ eps)", ")", "rmsnorm_bwd", {}, {}),
    "mean kept": (MEAN, "pass", "layernorm", {}, {}),
    "mean kept, backward": (MEAN, "pass", "layernorm_bwd", {}, {}),
    "mean of the gradient kept": ("dx -= jnp.mean(weighted, axis=1, keepdims=True)", "pass", "layernorm_bwd", {}, {}),
    "bias missing": ("for ref in bias_ref:", "for ref in ():", "layernorm", {}, {}),
    "one tile short": (ALL, ALL.replace("tile_rows,", "tile_rows - 1,"), "rmsnorm", {}, {}),
    "last block unwritten": (
        ALL, f"pl.when(pl.program_id(0) < pl.num_programs(0) - 1)(lambda: {ALL})", "rmsnorm", {}, {}
    ),
    "unroll's rest skipped": ("if not static or count % unroll:", "if False:", "rmsnorm", {}, {"unroll": 3}),
    "first two blocks": ("lambda i: (i, 0))\n", "lambda i: (i % 2, 0))\n", "rmsnorm", {}, {}),
    "residual left out": ("sum(_wide(ref, at) for ref in inputs)", "_wide(inputs[0], at)", "rmsnorm", RESIDUAL, {}),
    "gradient of the sum left out": ("for ref in sum_grad_ref:", "for ref in ():", "rmsnorm_bwd", RESIDUAL, {}),
    "mask one more": (LEFT, LEFT.replace("<", "<="), "rmsnorm_bwd", {}, {}),
    "mask one less": (LEFT, LEFT.replace("row <", "row + 1 <"), "layernorm_bwd", {}, {}),
    "no mask": ("if masked:", "if False:", "rmsnorm_bwd", {}, {}),
    "edge's tile skipped": ("if rows % tile_rows:", "if False:", "rmsnorm_bwd", {}, {}),
    "sums reset every block": ("pl.when(step == 0)", "pl.when(step >= 0)", "rmsnorm_bwd", {}, {}),
    "sums never reset": ("pl.when(step == 0)", "pl.when(step < 0)", "rmsnorm_bwd", {}, {}),
    "sums of the last tile": (SUM, SUM.replace("+=", "="), "rmsnorm_bwd", {}, {}),
    "a block counted twice": (EVEN, "even=rows % block_rows == 0", "rmsnorm_bwd", {"rows": 48}, PARTS),
    "one part's sums": ("jnp.sum(each, axis=(0, 1))", "each[0, 0]", "rmsnorm_bwd", {}, PARTS),
    "buffers not waited for": ("pl.when(step >= 2)", "pl.when(step < 0)", "rmsnorm", {}, PIECES),
    "last but one write not awaited": ("pl.when(step >= 1)", "pl.when(step < 0)", "rmsnorm", {}, PIECES),
    "last write not awaited": ("            _await(write(step))\n", "", "rmsnorm", {}, PIECES),
    "first piece twice": ("buffer.at[slot, pl.ds(piece * rows", "buffer.at[slot, pl.ds(0", "rmsnorm", {}, PIECES),
    "normed rows for the sum": ("zip(outputs, buffers,", "zip(outputs, [buffers[0]] * 2,", "rmsnorm", RESIDUAL, PIECES),
    "dbias for dweight": ("(grad * normed, grad)", "(grad, grad * normed)", "layernorm_bwd", {}, {}),
}  # fmt: skip
# Of a kind with others: left to the slow run.
SLOW = {
    "buffers not waited for",
    "last but one write not awaited",
    "first piece twice",
    "normed rows for the sum",
    "mean of the gradient kept",
    "mask one less",
    "edge's tile skipped",
    "first two blocks",
    "a block counted twice",
    "eps missing, backward",
    "mean kept, backward",
    "bias missing",
    "one tile short",
    "unroll's rest skipped",
    "no mask",
    "sums never reset",
    "sums of the last tile",
    "one part's sums",
    "dbias for dweight",
    "residual left out",
    "gradient of the sum left out",
}


@pytest.mark.parametrize(
    ("old", "new", "name", "problem", "config"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in WRONG.items()],
)
def test_wrong_texts_are_rejected(monkeypatch, old, new, name, problem, config):
    kernel = KERNELS[name]
    rewrite(monkeypatch, blocked, "norm_backward_pallas" if kernel.backward else "norm_pallas", old, new)
    verdict = validate(kernel, *instance(kernel, problem, config))
    assert verdict.status in REJECTED, verdict


def instance(kernel, problem, config):
    """The kernel's problem and config of these tests, with these changes."""
    small = kernel.parse_problem(None).replace({**SMALL, **problem})
    return small, kernel.space(small, CHIPS["v5p"]).parse({**TILES, **config})


@pytest.mark.parametrize(
    ("name", "problem", "config"),
    [
        pytest.param("rmsnorm", RESIDUAL, {"unroll": 2}, marks=pytest.mark.slow),
        pytest.param("rmsnorm", {"dtype": "bfloat16"}, {"block_rows_compute": 16}, marks=pytest.mark.slow),
        ("rmsnorm", RESIDUAL, PIECES),
        pytest.param("layernorm", {}, {"block_rows": 80, **PIECES}, marks=pytest.mark.slow),
        pytest.param("rmsnorm_bwd", {"rows": 401, **RESIDUAL}, {}, marks=pytest.mark.slow),
        pytest.param("rmsnorm_bwd", {"rows": 48}, PARTS, marks=pytest.mark.slow),
        pytest.param("layernorm", RESIDUAL, {"unroll": 2}, marks=pytest.mark.slow),
        ("layernorm_bwd", {"dtype": "bfloat16", "rows": 33}, {"block_rows_compute": 16, **PARTS}),
        pytest.param("layernorm_bwd", {"d": 130}, {}, marks=pytest.mark.slow),
    ],
)
def test_right_kernels_pass(name, problem, config):
    verdict = validate(KERNELS[name], *instance(KERNELS[name], problem, config))
    assert verdict.ok, verdict.message
    assert len(verdict.problems) == 2


@pytest.mark.parametrize("name", KERNELS)
def test_validation_has_the_problems_own_edge_and_three_blocks(name):
    kernel, rng = KERNELS[name], random.Random(1)
    for text in ("", "rows=5", "rows=1001,d=200", "rows=25216,d=768,dtype=float32,residual=true"):
        problem = kernel.parse_problem(text)
        configs = list(kernel.space(problem, CHIPS["v5p"]))
        for config in rng.sample(configs, min(20, len(configs))):
            block = config["block_rows"]
            own, three = kernel.validation_problems(problem, config)
            assert own.rows % block == problem.rows % block
            assert own.rows > block
            assert 2 * block < three.rows < 3 * block
            parts, blocks = config.get("parts", 1), -(-problem.rows // block)
            assert -(-own.rows // block) % parts == blocks % parts or own.rows < problem.rows


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40_000) | st.sampled_from([2**31 - 1, 735_134_400]),
    d=st.integers(1, 20_000) | st.sampled_from([2**16, 2**17]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    residual=st.booleans(),
    name=st.sampled_from(list(KERNELS)),
)
def test_heuristic_and_default_are_valid_and_no_estimate_beats_the_roofline(rows, d, dtype, residual, name):
    kernel, problem = KERNELS[name], NormProblem(rows=rows, d=d, dtype=dtype, residual=residual)
    for chip in CHIPS.values():
        space = kernel.space(problem, chip)
        assert space.cardinality < 20_000
        if d > 20_000 and chip.vmem_bytes < 2**27:  # one tile of such rows may be more than there is
            continue
        heuristic = kernel.heuristic(problem, chip)
        configs = [heuristic] if d > 20_000 else [heuristic, kernel.baselines(problem, chip)["default"]]
        for config in configs:
            assert space.why_invalid(config) is None
            assert kernel.estimate_ms(problem, config, chip) >= 0.99 * kernel.cost(problem).roofline_ms(chip)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_rows": 0}, "block_rows must be a positive multiple of 16 up to 8192"),
        ({"block_rows": 10_000}, "block_rows must be a positive multiple of 16 up to 8192"),
        ({"block_rows_compute": 8}, "block_rows_compute must be a positive multiple of 16"),
        ({"block_rows": 64, "block_rows_compute": 48}, "block_rows_compute must divide block_rows"),
        ({"unroll": 9}, "unroll must be between 1 and 8"),
        ({"unroll": 8}, "must be at most 1048576 elements"),
        ({"parts": 65}, "parts must be between 1 and the number of blocks"),
        ({"block_rows": 1024}, "the blocks alone need more VMEM than vmem_limit_mib"),
    ],
)
def test_broken_constraints_are_named(change, says):
    kernel, chip = KERNELS["rmsnorm_bwd"], CHIPS["v5e"]
    problem = kernel.parse_problem(None)
    config = {**kernel.baselines(problem, chip)["default"], **change}
    assert says in kernel.space(problem, chip).why_invalid(config)


def test_heuristics_compile_for_the_smallest_limit():
    """Few rows and many, narrow and wide; forward is alike and needs less."""
    kernel, chip = KERNELS["layernorm_bwd"], CHIPS["v5e"]
    texts = ["rows=5,d=40", "rows=1001,d=1600,residual=true", "rows=512,d=12288,dtype=float32,residual=true"]
    configs = [(text, kernel.heuristic(kernel.parse_problem(text), chip)) for text in texts]
    assert compile_all(kernel.name, chip.name, configs) == ["ok"] * len(texts)


def test_problems_load_no_jax():
    script = "import sys, kernels.norm.problem, kernels.norm.cost, search_spaces.norm; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

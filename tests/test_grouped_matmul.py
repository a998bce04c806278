"""The grouped matmul and its gradients, by themselves and as the tuner sees them: numerics, wrong kernels, spaces."""

import functools
import inspect
import itertools
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS, MIB
from autotune.errors import UsageError
from autotune.kernel import get_kernel
from autotune.validation import validate
from kernels.grouped_matmul import PROBLEMS, drhs, grouped_matmul, transfers
from kernels.grouped_matmul import pallas as tiled
from kernels.grouped_matmul import visits as tables
from kernels.grouped_matmul.cost import cost
from kernels.grouped_matmul.problem import GroupedMatmulProblem, GroupedProblem, routed
from kernels.grouped_matmul.visits import plan_visits
from search_spaces.grouped_matmul import GroupedMatmulDrhsKernel, GroupedMatmulKernel, mixed_sizes
from tests.test_races import DETECTING, races
from tests.test_spaces import compile_all
from tests.test_validation import NAN_MEMORY, REJECTED, rewrite

PRODUCT, DRHS = GroupedMatmulKernel(), GroupedMatmulDrhsKernel()
KERNELS = {kernel.name: kernel for kernel in (PRODUCT, DRHS)}
TILES = {"block_m": 32, "block_n": 128, "block_k": 128}
CONFIGS = ("config", "dlhs_config", "drhs_config")
EARLY = {"block_m": 32, "block_n": 128, "block_k": 256, "block_m_compute": 16, "transfers": "early"}


def operands(sizes, m: int, n: int, k: int, dtype: str = "float32", transpose_rhs: bool = False):
    """lhs, rhs, group_sizes and a gradient of the result."""
    keys = jax.random.split(jax.random.key(m + n + k), 3)
    shapes = (m, k), (len(sizes), *((n, k) if transpose_rhs else (k, n))), (m, n)
    lhs, rhs, grad = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    return lhs, rhs, jnp.asarray(sizes, jnp.int32), grad


def plain(lhs, rhs, sizes, grad, transpose_rhs: bool = False) -> list[np.ndarray]:
    """The result and the gradients of lhs and rhs, one group at a time, in float64."""
    lhs, rhs, grad = (np.asarray(array, np.float64) for array in (lhs, rhs, grad))
    matrices = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out, dlhs, drhs = np.zeros(grad.shape), np.zeros(lhs.shape), np.zeros(matrices.shape)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        out[start:end] = lhs[start:end] @ matrices[group]
        dlhs[start:end] = grad[start:end] @ matrices[group].T
        drhs[group] = lhs[start:end].T @ grad[start:end]
    return [out, dlhs, drhs.swapaxes(1, 2) if transpose_rhs else drhs]


def assert_close(got, want, dtype="float32") -> None:
    """Within some roundings of the dtype, in the norm and in each element; what must be zero is."""
    got = np.asarray(got, np.float64)
    tolerance = 2e-6 if dtype == "float32" else 2**-7
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
    np.testing.assert_allclose(got, want, rtol=8 * tolerance, atol=8 * tolerance * np.abs(want).max())
    np.testing.assert_array_equal(got[want == 0], 0)


def results(lhs, rhs, sizes, grad, **options) -> list[jax.Array]:
    """The kernels' result and gradients, jitted."""

    @jax.jit
    def run(lhs, rhs, sizes):
        out, gradients = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, **options), lhs, rhs)
        return out, *gradients(grad)

    return run(lhs, rhs, sizes)


@settings(max_examples=1, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    rest=st.integers(0, 70),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    block=st.sampled_from([{"block_m_compute": 16}, {"block_k": 384}, {"block_m": 64, "block_m_compute": 32}]),
    transpose_rhs=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@example([0, 45, 3, 0, 50, 0], 40, 200, 300, {"block_m_compute": 16}, True, "float32")
def test_results_and_gradients_of_any_sizes_are_right_with_nan_memory(sizes, rest, n, k, block, transpose_rhs, dtype):
    m = max(sum(sizes) + rest, 1)
    arrays = operands(sizes, m, n, k, dtype, transpose_rhs)
    config = {**TILES, **block}
    if min(m, config["block_m"]) % config.get("block_m_compute", 1):
        config["block_m_compute"] = None
    configs = dict.fromkeys(CONFIGS, config)
    got = results(*arrays, transpose_rhs=transpose_rhs, **configs, interpret=NAN_MEMORY)
    for array, want in zip(got, plain(*arrays, transpose_rhs), strict=True):
        assert array.dtype == dtype
        assert_close(array, want, dtype)


@pytest.mark.parametrize(
    ("sizes", "transpose_rhs"),
    [([0, 33, 5, 0, 58, 0], False), pytest.param([64, 0, 32], True, marks=pytest.mark.slow)],
)
def test_early_transfers(sizes, transpose_rhs):
    arrays = operands(sizes, 160, 256, 256, transpose_rhs=transpose_rhs)
    options = dict.fromkeys(CONFIGS, EARLY)
    got = results(*arrays, transpose_rhs=transpose_rhs, **options, interpret=NAN_MEMORY)
    for array, want in zip(got, plain(*arrays, transpose_rhs), strict=True):
        assert_close(array, want)


@pytest.mark.parametrize("kernel", [pytest.param(PRODUCT, marks=pytest.mark.slow), DRHS], ids=KERNELS)
def test_early_transfers_do_not_race(kernel):
    problem = kernel.parse_problem("m=96,n=256,k=256,groups=4,dtype=float32")
    assert not races(kernel.bind(problem, EARLY, interpret=DETECTING), *kernel.make_inputs(problem, 0))


@functools.cache
def planned(empty_too: bool):
    return jax.jit(functools.partial(plan_visits, m=300, block_m=16, empty_too=empty_too))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 50) | st.just(0) | st.sampled_from([16, 32, 64]), min_size=6, max_size=6),
    empty_too=st.booleans(),
)
@example([64, 64, 0, 64, 64, 44], True)
@example([0] * 6, True)
def test_visits_are_each_group_s_tiles_in_order(sizes, empty_too):
    m, block_m = 300, 16
    sizes = np.diff(np.minimum(np.cumsum([0, *sizes]), m))
    groups, tiles, bounds, count = jax.tree.map(np.asarray, planned(empty_too)(jnp.asarray(sizes, jnp.int32)))
    want = []
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        assert end - start == sizes[group]
        of_rows = sorted({row // block_m for row in range(start, end)})
        last = (m - 1) // block_m
        want += [(group, tile) for tile in of_rows or [min(start // block_m, last)] * empty_too]
    assert list(zip(groups[:count], tiles[:count], strict=True)) == want
    assert len(groups) >= count
    assert groups.max() < len(sizes)
    assert tiles.max() <= (m - 1) // block_m


@pytest.mark.parametrize("transpose_rhs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_runs_where_there_is_no_tpu(transpose_rhs):
    arrays = operands([3, 0, 5], 10, 6, 7, transpose_rhs=transpose_rhs)
    for got, want in zip(results(*arrays, transpose_rhs=transpose_rhs), plain(*arrays, transpose_rhs), strict=True):
        assert_close(got, want)


def test_a_jitted_step_for_a_tpu_has_all_three_kernels_and_no_transposed_copy():
    arrays = operands([3, 0, 5], 16, 128, 128)
    step = jax.jit(jax.grad(lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes).sum(), argnums=(0, 1)))
    text = step.trace(*arrays[:3]).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2  # the product itself is not needed
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    "options", [{}, {**dict.fromkeys(CONFIGS, TILES), "interpret": NAN_MEMORY}], ids=["xla", "own"]
)
@pytest.mark.parametrize(
    "axes", [(0, None, None), *(pytest.param(axes, marks=pytest.mark.slow) for axes in ((None, 0, 0), (0, 0, 0)))]
)
def test_vmap_over_any_argument(axes, options):
    """Some of the arrays batched; each element's result and gradients are as by itself."""
    lhs, rhs, sizes, grad = operands([3, 0, 5], 10, 6, 7)
    arrays = [(lhs, -lhs), (rhs, 2 * rhs), (sizes, sizes[::-1])]
    batched = [jnp.stack(both) if axis == 0 else both[0] for both, axis in zip(arrays, axes, strict=True)]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=axes)
    def run(lhs, rhs, sizes):
        out, gradients = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, **options), lhs, rhs)
        return out, *gradients(grad)

    got = run(*batched)
    for number in range(2):
        one = [both[number if axis == 0 else 0] for both, axis in zip(arrays, axes, strict=True)]
        for array, want in zip(got, plain(*one, grad), strict=True):
            assert_close(array[number], want)


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "transpose_rhs"),
    [
        ((4, 5), (2, 6, 7), (2,), False),
        ((4, 5), (2, 5, 7), (2,), True),
        ((4, 5), (2, 5, 7), (3,), False),
        ((2, 4, 5), (2, 5, 7), (2,), False),
        ((4, 5), (5, 7), (2,), False),
    ],
)
def test_shapes_that_do_not_fit_are_refused(lhs, rhs, sizes, transpose_rhs):
    right = r"must be \[m, k\], \[groups, " + ("n, k" if transpose_rhs else "k, n") + r"\] and \[groups\]"
    with pytest.raises(UsageError, match=right):
        grouped_matmul(jnp.ones(lhs), jnp.ones(rhs), jnp.ones(sizes, jnp.int32), transpose_rhs=transpose_rhs)


def test_dtypes_and_options_that_do_not_fit_are_refused():
    lhs, rhs, sizes = jnp.ones((4, 5)), jnp.ones((2, 5, 7)), jnp.ones(2, jnp.int32)
    with pytest.raises(UsageError, match="must both be bfloat16 or float32"):
        grouped_matmul(lhs, rhs.astype(jnp.bfloat16), sizes)
    with pytest.raises(UsageError, match="must be int32"):
        grouped_matmul(lhs, rhs, sizes.astype(jnp.float32))
    with pytest.raises(UsageError, match="must be whole blocks"):
        grouped_matmul(jnp.ones((12, 5)), rhs, sizes, config={**EARLY, "block_m": 8}, interpret=NAN_MEMORY)
    with pytest.raises(UsageError, match=r"skew=-1.0: must be between 0 and 10"):
        PRODUCT.parse_problem("skew=-1")


@pytest.mark.parametrize(
    ("m", "dtype", "config", "says"),
    [
        (
            100,
            "float32",
            {"block_m": 128, "block_m_compute": 32},
            "block_m_compute=32 with block_m=100: must be the",
        ),
        (256, "float32", {"block_m": 128, "block_m_compute": 48}, "or a multiple of 8 that divides it"),
        (256, "bfloat16", {"block_m": 128, "block_m_compute": 8}, "or a multiple of 16 that divides it"),
        (256, "float32", {"block_m": 128, "block_m_compute": -8}, "block_m_compute=-8 with block_m=128"),
        (96, "float32", {"block_m": 12, "transfers": "early"}, "block_m=12: must be a positive multiple of 8, or the"),
        (96, "bfloat16", {"block_m": 24}, "block_m=24: must be a positive multiple of 16, or the whole m=96"),
        (96, "float32", {"block_m": 0}, "block_m=0: must be a positive multiple of 8"),
    ],
)
def test_tiles_that_start_where_no_slice_may_are_refused(m, dtype, config, says):
    """A TPU would compute other rows without a word."""
    lhs, rhs, sizes, grad = operands([3, 5], m, 128, 128, dtype)
    for kernel, arrays in ((PRODUCT, (lhs, rhs, sizes)), (DRHS, (lhs, grad, sizes))):
        problem = kernel.parse_problem(f"m={m},n=128,k=128,groups=2,dtype={dtype}")
        with pytest.raises(UsageError, match=says):
            kernel.bind(problem, {**TILES, **config})(*arrays)


# Validation.

SMALL = {"m": 4096, "n": 512, "k": 512, "groups": 64, "dtype": "float32"}


def instance(kernel, problem, config):
    return kernel.parse_problem(None).replace({**SMALL, **problem}), {**TILES, **config}


@pytest.mark.parametrize(
    ("kernel", "problem", "config"),
    [
        pytest.param(PRODUCT, {}, {"block_m_compute": 16}, marks=pytest.mark.slow),
        pytest.param(DRHS, {"dtype": "bfloat16"}, {**EARLY, "block_k": 128}, marks=pytest.mark.slow),
        pytest.param(PRODUCT, {"k": 256}, EARLY, marks=pytest.mark.slow),
        pytest.param(PRODUCT, {"transpose_rhs": True, "dtype": "bfloat16"}, {}, marks=pytest.mark.slow),
        pytest.param(PRODUCT, {"m": 40, "groups": 1, "n": 70}, {"block_m": 40, "block_n": 70}, marks=pytest.mark.slow),
        pytest.param(DRHS, {"n": 200}, {"block_m_compute": 16}, marks=pytest.mark.slow),
        (PRODUCT, {"m": 5, "groups": 2, "dtype": "bfloat16"}, {"block_m": 5}),
        pytest.param(
            DRHS,
            {"m": 40, "dtype": "bfloat16"},
            {**EARLY, "block_m": 40, "block_m_compute": 40},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DRHS, {"m": 5, "n": 1, "k": 7}, {"block_m": 5, "block_n": 1, "block_k": 7}, marks=pytest.mark.slow
        ),
    ],
)
def test_right_kernels_pass(kernel, problem, config):
    problem, config = instance(kernel, problem, config)
    verdict = validate(kernel, problem, config)
    assert verdict.ok, verdict.message
    assert 0 <= verdict.max_rel_error < verdict.tolerance  # one step's sums may be the reference's, bit by bit
    assert len(verdict.problems) >= 2


# What is done to the kernels' text: of which kernel, on which problem and config it matters.
PARTS, WHOLE = {"block_m_compute": 16}, {"k": 256}
PIECE = {**EARLY, "block_k": 128}
FIRST = "(group_start >= 0) & (i == 0), 0.0"
PART = "jnp.minimum(first + i * tile, block - tile)"
LAST = "(step == steps - 1) & (group == rest)"
WRONG = {
    "rows before a group's start": (PRODUCT, "jnp.where(index >= start, value", "jnp.where(index >= 0, value", {}, {}),
    "a row more": (PRODUCT, "jnp.where(index >= start, value", "jnp.where(index >= start - 1, value", {}, {}),
    "a row less": (PRODUCT, "jnp.where(index >= start, value", "jnp.where(index > start, value", {}, {}),
    "others' rows not kept": (PRODUCT, "value, kept)", "value, 0.0)", {}, {}),
    "another group's matrix": (PRODUCT, "jnp.minimum(group[visit], groups - 1)", "group[0]", {}, {}),
    "rows without a group not cleared": (PRODUCT, LAST, "(step == steps) & (group == rest)", {}, {}),
    "tail not cut": (PRODUCT, "tail=k % block_k or block_k", "tail=block_k", {}, {}),
    "sums not reset": (PRODUCT, "jnp.where(step == 0, 0.0, sums[0][at, :])", "sums[0][at, :]", {}, {}),
    "last step alone": (PRODUCT, "sums[0][at, :] + value if sums else value", "value", {}, {}),
    "sums by row, not by tile": (PRODUCT, "pl.multiple_of(i * tile, tile)", "row", {}, PARTS),
    "a part of the rows skipped": (PRODUCT, "end - first + tile - 1, tile), one", "end - first, tile), one", {}, PARTS),
    "parts not at the group's start": (PRODUCT, PART, "jnp.minimum(i * tile, block - tile)", {}, PARTS),
    "transposed": (PRODUCT, "1 if transpose_rhs else 0)", "0)", {"n": 128, "k": 128, "transpose_rhs": True}, {}),
    "another matrix than came": (PRODUCT, ".at[slot_ref[0]], result)", ".at[0], result)", WHOLE, EARLY),
    "another tile than came": (PRODUCT, "rows_ref.at[jax.lax.rem(tile, 2)]", "rows_ref.at[0]", WHOLE, EARLY),
    "the same tile again": (PRODUCT, "part_of(tile, block_m, lhs_ref.shape[0])", "pl.ds(0, block_m)", WHOLE, EARLY),
    "first columns of a matrix": (PRODUCT, "[group, :, columns]", "[group, :, pl.ds(0, block_n)]", WHOLE, EARLY),
    "a sum kept from the group before": (DRHS, FIRST, "(visit == 0) & (i == 0), 0.0", {}, {}),
    "a sum begun at each visit": (DRHS, FIRST, "i == 0, 0.0", {}, {}),
    "empty groups not cleared": (DRHS, "group_start == group_end)", "group_start > group_end)", {}, {}),
    "empty groups not visited": (DRHS, "m, block_m, empty_too=True", "m, block_m, empty_too=False", {}, {}),
    "lhs unmasked": (DRHS, "product_of(mine(lhs_ref),", "product_of(lhs_ref[rows, :],", {}, {}),
    "grad unmasked": (DRHS, "mine(grad_ref)", "grad_ref[rows, :]", {}, {}),
    "rows counted twice": (DRHS, "index >= jnp.maximum(low, start)", "index >= start", {}, PARTS),
    "sum in bfloat16": (DRHS, "return before +", "return before.astype(jnp.bfloat16) +", {}, {}),
    "the last tile alone": (DRHS, "so_far(count - 1).as", "(so_far(count - 1) - sum_ref[...]).as", {}, {}),
    "half of a result": (DRHS, "pl.ds(piece * length, length)", "pl.ds(0, length)", {}, PIECE),
    "half of a result twice": (PRODUCT, "pl.ds(piece * length, length)", "pl.ds(0, length)", WHOLE, EARLY),
    "another result than is sent": (DRHS, "2), jax.lax.rem(group, 2)", "2), 0", {}, PIECE),
    "another result's rows": (PRODUCT, "results_ref.at[jax.lax.rem(tile, 2)]", "results_ref.at[0]", WHOLE, EARLY),
}  # fmt: skip
QUICK = {
    "rows before a group's start",
    "rows without a group not cleared",
    "empty groups not cleared",
    "rows counted twice",
}
CASES = [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in WRONG.items()]


@pytest.mark.parametrize(("kernel", "old", "new", "problem", "config"), CASES)
def test_wrong_texts_are_rejected(monkeypatch, kernel, old, new, problem, config):
    module, function = (tiled, "grouped_matmul_pallas") if kernel is PRODUCT else (drhs, "grouped_matmul_drhs_pallas")
    if old in inspect.getsource(transfers):
        rewrite(monkeypatch, transfers, "pieces_of", old, new)
        monkeypatch.setattr(module, "pieces_of", transfers.pieces_of)
    else:
        rewrite(monkeypatch, module, function, old, new)
    verdict = validate(kernel, *instance(kernel, problem, config))
    assert verdict.status in REJECTED, verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(ends - 1) // block_m - first_tile + 1", "(ends - starts - 1) // block_m + 1"),
        ("first_tile - visits_before)", "starts // block_m - visits_then)"),
        ("visit[:, None] < visits_then", "visit[:, None] <= visits_then"),
        ("jnp.zeros(1, jnp.int32), ends", "jnp.zeros(1, jnp.int32), ends + 1"),
    ],
)
def test_wrong_tables_are_rejected(monkeypatch, old, new):
    rewrite(monkeypatch, tables, "plan_visits", old, new)
    monkeypatch.setattr(tiled, "plan_visits", tables.plan_visits)
    verdict = validate(PRODUCT, *instance(PRODUCT, {}, {}))
    assert verdict.status in REJECTED, verdict


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("text", ["", "dtype=float32", "m=1001,n=777,k=5003,groups=9", "deepseek-v3-down"])
def test_validation_has_all_that_the_problem_has_in_reach_of_a_cpu(kernel, text):
    problem = kernel.parse_problem(text)
    space = kernel.space(problem, CHIPS["v5e"])
    for config in random.Random(1).sample(list(space), 20):
        smalls = kernel.validation_problems(problem, config)
        block = config["block_m"]
        one_block = block == problem.m == 1001
        assert any(small.m > 2 * block or one_block for small in smalls)
        for small in smalls:
            assert kernel.space(small, CHIPS["v5e"]).parse(config)
            if config["transfers"] == "early":
                assert small.m % block == small.n % config["block_n"] == small.k % config["block_k"] == 0
            assert small.dtype == problem.dtype
            assert kernel.cost(small).flops < 4e11
            assert sum(spec.nbytes for spec in kernel.arguments(small)) < 1024 * MIB
        assert config["transfers"] == "early" or one_block or any(small.m % block for small in smalls)


@pytest.mark.parametrize("seed", range(3))
def test_inputs_have_groups_of_every_kind(seed):
    for groups in (7, 8):
        sizes = mixed_sizes(200, groups, seed)
        assert (sizes == 0).sum() >= 2
        assert 0 < sizes[sizes > 0].min() < 8
        assert sizes.max() > 64
        assert (sizes.sum() == 200) == (groups == 7)
    assert sizes[0] == sizes[-1] == 0
    assert mixed_sizes(1, 1, seed).sum() == 1


# The spaces and the costs.


def test_the_kernels_are_registered():
    for name, kernel in KERNELS.items():
        assert isinstance(get_kernel(name), type(kernel))
        assert len(kernel.version) == 12


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_space_is_large_enumerable_and_holds_the_baseline(kernel, chip):
    problem = kernel.parse_problem(None)
    space = kernel.space(problem, chip)
    assert 40 < space.size < 20_000
    baseline = kernel.baselines(problem, chip)["default"]
    assert space.why_invalid(baseline) is None
    assert [baseline[f"block_{field}"] for field in "mnk"] == [128, 128, 128]
    best = min(space, key=lambda config: kernel.estimate_ms(problem, config, chip))
    assert kernel.estimate_ms(problem, best, chip) < kernel.estimate_ms(problem, baseline, chip) / 2


@pytest.mark.parametrize(
    ("kernel", "change", "says"),
    [
        (PRODUCT, {"block_m": 100}, "block_m must be a positive multiple of 16 up to m=32768"),
        (PRODUCT, {"block_n": 0}, "block_n must be a positive multiple of 128 up to n=768"),
        (PRODUCT, {"block_m": 256, "block_m_compute": 96}, "block_m_compute must be block_m itself, or a multiple of"),
        (PRODUCT, {"transfers": "early"}, "early needs blocks that divide m=32768, n=768 and k=2048, that of k the"),
        (PRODUCT, {"transfers": "late"}, "transfers must be step or early"),
        (PRODUCT, {"block_m": 1024, "block_k": 2048}, "the blocks alone need more VMEM than vmem_limit_mib"),
        (DRHS, {"transfers": "early", "block_n": 512}, "transfers=early needs blocks that divide"),
    ],
)
def test_broken_constraints_are_named(kernel, change, says):
    problem, chip = kernel.parse_problem(None), CHIPS["v5e"]
    config = {**kernel.baselines(problem, chip)["default"], "block_n": 768, "vmem_limit_mib": 8, **change}
    assert says in kernel.space(problem, chip).why_invalid(config)


sizes = st.integers(1, 9000) | st.integers(1, 100).map(lambda n: 128 * n)


@settings(max_examples=40, deadline=None)
@given(m=sizes, n=sizes, k=sizes, groups=st.integers(1, 300), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_the_heuristic_is_valid_on_every_chip_and_no_estimate_beats_the_roofline(m, n, k, groups, dtype):
    fields = {"m": m, "n": n, "k": k, "groups": groups, "dtype": dtype}
    for kernel, problem in ((PRODUCT, GroupedMatmulProblem(**fields)), (DRHS, GroupedProblem(**fields))):
        for chip in CHIPS.values():
            config = kernel.heuristic(problem, chip)
            assert kernel.space(problem, chip).why_invalid(config) is None
            assert kernel.estimate_ms(problem, config, chip) >= 0.99 * kernel.cost(problem).roofline_ms(chip)


def test_the_roofline_reads_matrices_of_groups_with_rows_and_writes_all():
    problem = GroupedProblem(m=2, n=3, k=5, groups=4, skew=0.0, dtype="float32")
    used = np.count_nonzero(routed(2, 4, 0.0))
    assert 1 <= used <= 2
    rows = 2 * 5 + 2 * 3
    assert cost(problem).flops == 2 * 2 * 3 * 5
    assert cost(problem).nbytes == 4 * (rows + used * 5 * 3) + 16
    assert cost(problem, drhs=True).nbytes == 4 * (rows + 4 * 5 * 3) + 16


def test_routing_is_a_fixed_uneven_draw():
    for problem in PROBLEMS.values():
        drawn = routed(problem.m, problem.groups, problem.skew)
        assert drawn.sum() == problem.m
        assert 1.2 * drawn.mean() < drawn.max() < 8 * drawn.mean()
        np.testing.assert_array_equal(drawn, routed.__wrapped__(problem.m, problem.groups, problem.skew))
        np.testing.assert_array_equal(drawn, PRODUCT.arguments(problem)[2].example)


@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_takes_what_it_should(name):
    kernel, chip = KERNELS[name], CHIPS["v5e"]
    texts = ["m=500,n=300,k=700,groups=5", "m=512,n=256,k=512,groups=5,dtype=float32", "m=5,n=3,k=7,groups=2"]
    configs = [(text, kernel.heuristic(kernel.parse_problem(text), chip)) for text in texts]
    if kernel is PRODUCT:
        configs.append((f"{texts[0]},transpose_rhs=true", configs[0][1]))
        for text in ("m=300,n=1,k=129,groups=2,transpose_rhs=true", "m=96,n=1,k=7,groups=2,transpose_rhs=true"):
            configs.append((text, kernel.heuristic(kernel.parse_problem(text), chip)))
    problem = kernel.parse_problem("m=4096,n=512,k=512,groups=5")
    space = kernel.space(problem, chip)
    config = space.parse({"block_m": 1024, "block_n": 512, "block_k": 512})
    tight = max(limit for limit in range(1, 20) if space.why_invalid({**config, "vmem_limit_mib": limit}))
    configs.append((str(problem), {**config, "vmem_limit_mib": tight}))
    found = compile_all(name, "v5e", configs, JAX_DEFAULT_MATMUL_PRECISION="highest")
    assert found == ["ok"] * (len(configs) - 1) + ["vmem"]


def test_problems_load_no_jax():
    script = "import sys, kernels.grouped_matmul.cost, search_spaces.grouped_matmul; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

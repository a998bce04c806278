"""The kernels that JAX ships, as kernels to tune: their spaces, their numerics, and their blocks in their own types."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autotune import presets
from autotune.chips import CHIPS, get_chip
from autotune.engines import Task, open_engine
from autotune.errors import UsageError
from autotune.kernel import get_kernel
from autotune.outcome import Source, Status
from autotune.validation import validate
from kernels import stock
from kernels.requests import requested
from kernels.stock import FlashProblem, PagedProblem, SplashProblem, StockGmmProblem, StockMatmulProblem

STOCK = (
    "stock_flash",
    "stock_gmm",
    "stock_matmul",
    "stock_paged_attention",
    "stock_ragged_paged_attention",
    "stock_splash",
    "stock_splash_bwd",
)
SPLASH = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 512, "kv_len": 512, "head_dim": 128}
SMALL = {
    "stock_flash": FlashProblem(**{**SPLASH, "kv_heads": 4}),
    "stock_gmm": StockGmmProblem(m=1024, n=384, k=320, groups=16),
    "stock_matmul": StockMatmulProblem(m=512, n=512, k=512),
    "stock_paged_attention": PagedProblem(
        batch=4, heads=16, kv_heads=2, head_dim=128, page_size=16, pages_per_seq=8, kv_len=100
    ),
    "stock_splash": SplashProblem(**SPLASH),
    "stock_splash_bwd": SplashProblem(**SPLASH),
}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("name", STOCK)
def test_every_named_problem_has_a_space_baselines_and_a_heuristic(name, chip):
    kernel = get_kernel(name)
    for problem in kernel.problems.values():
        limit = problem.scoped_vmem_mib
        if limit is not None and limit * 2**20 > chip.vmem_bytes:
            continue
        space = kernel.space(problem, chip)
        config = kernel.heuristic(problem, chip)
        for one in (config, *kernel.baselines(problem, chip).values()):
            assert space.why_invalid(one) is None
            assert (kernel.cost(problem).roofline_ms(chip) or 1e-9) > 0
            assert 0 < kernel.estimate_ms(problem, one, chip) < float("inf")
            assert all(text for text in kernel.terms(problem, one).values())
        assert space.size > 1


@pytest.mark.parametrize(
    "name", [name if name == "stock_splash" else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_the_default_is_right_and_what_is_wrong_is_found(name, monkeypatch):
    kernel, problem = get_kernel(name), SMALL[name]
    config = kernel.baselines(problem, get_chip("v5e"))["default"]
    verdict = validate(kernel, problem, config)
    assert verdict.ok, verdict.message
    bound = kernel.bind

    def first_block_lost(*arguments, **options):
        import jax

        function = bound(*arguments, **options)
        return lambda *arrays: jax.tree.map(lambda x: x.at[:1].set(0), function(*arrays))

    monkeypatch.setattr(kernel, "bind", first_block_lost, raising=True)
    assert validate(kernel, problem, config).status is Status.WRONG_RESULT


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": 200},
        {"soft_cap": 20.0},
        {"packed": True},
        {"kv_len": 1024},
        {"v_head_dim": 64, "head_dim": 256},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["stock_splash", "stock_splash_bwd"])
def test_splash_is_right_with_every_option(name, options):
    kernel = get_kernel(name)
    problem = SplashProblem(**{**SPLASH, **options})
    chip = get_chip("v6e")
    verdict = validate(kernel, problem, kernel.heuristic(problem, chip))
    assert verdict.ok, verdict.message
    if name == "stock_splash_bwd":
        fused = kernel.space(problem, chip).parse(
            {"block_q_dkv": 256, "block_kv_dkv": 256, "block_kv_dkv_compute": 128, "use_fused_bwd_kernel": True}
        )
        verdict = validate(kernel, problem, fused)
        assert verdict.ok, verdict.message


def test_a_lost_mask_is_found(monkeypatch):
    from jax.experimental.pallas.ops.tpu.splash_attention import FullMask

    from kernels.stock import splash

    kernel = get_kernel("stock_splash")
    config = kernel.baselines(SMALL["stock_splash"], get_chip("v5e"))["default"]
    monkeypatch.setattr(splash, "CausalMask", lambda shape, offset: FullMask(shape))
    assert validate(kernel, SMALL["stock_splash"], config).status is Status.WRONG_RESULT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"q_len": 500, "kv_len": 500}, "q_len=500: must be a multiple of 128"),
        ({"dtype": "float32"}, "dtype=float32: must be bfloat16"),
        ({"packed": True, "q_len": 1024, "causal": False}, "with packed=true at most kv_len=512"),
        ({"kv_heads": 3}, "does not divide heads=4"),
        ({"scoped_vmem_mib": 0}, "must be a positive integer"),
    ],
)
def test_a_problem_that_splash_does_not_take_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        SplashProblem(**{**SPLASH, **fields})


def test_flash_takes_as_many_kv_heads_and_aligned_lengths():
    with pytest.raises(UsageError, match="as many as heads=4"):
        FlashProblem(**SPLASH)
    with pytest.raises(UsageError, match="the first key"):
        FlashProblem(**{**SPLASH, "kv_heads": 4, "kv_len": 1024})


@pytest.mark.parametrize("block_b", [1, 2, 4])
def test_a_batch_in_blocks_is_validated_in_blocks(block_b):
    kernel = get_kernel("stock_flash")
    problem = SMALL["stock_flash"].replace({"batch": 4})
    config = {"block_q": 128, "block_k_major": 256, "block_k": 128, "block_b": block_b}
    assert kernel.space(problem, get_chip("v6e")).why_invalid(config) is None
    small = kernel.validation_problems(problem, config)
    assert [one.batch for one in small] == [block_b, min(2 * block_b, 4)]
    assert all(one.batch % block_b == 0 for one in small)


def test_a_fused_backward_pass_has_no_blocks_of_its_own_for_queries():
    kernel, problem, chip = get_kernel("stock_splash_bwd"), SMALL["stock_splash_bwd"], get_chip("v6e")
    space = kernel.space(problem, chip)
    fields = {"block_q_dkv": 256, "block_kv_dkv": 256, "use_fused_bwd_kernel": True}
    config = space.parse(fields)
    assert (config["block_q_dq"], config["block_kv_dq"]) == (256, 256)
    assert space.why_invalid(config) is None
    assert "leave them out" in (space.why_invalid({**config, "block_q_dq": 128}) or "")
    assert kernel.terms(problem, config) == {
        "BlockSizes": "BlockSizes(block_q_dkv=256, block_kv_dkv=256, block_kv_dkv_compute=256, "
        "use_fused_bwd_kernel=True)",
        "MaxText": "sa_block_q_dkv=256 sa_block_kv_dkv=256 sa_block_kv_dkv_compute=256 sa_use_fused_bwd_kernel=True",
    }


def test_the_vmem_that_a_program_is_compiled_with_is_the_problems():
    kernel, chip = get_kernel("stock_splash"), get_chip("v6e")
    problem = get_kernel("stock_splash").problems["llama3-8b-8k"]
    large = problem.replace({"scoped_vmem_mib": 96})
    assert kernel.options(problem) == {}
    assert kernel.options(large) == {"xla_tpu_scoped_vmem_limit_kib": 98304}
    config = {"block_q": 4096, "block_kv": 8192, "block_kv_compute": 512}
    config["block_kv"] = 4096
    small = problem.replace({"scoped_vmem_mib": 8})
    assert kernel.space(large, chip).why_invalid(config) is None
    assert "scoped_vmem_mib" in (kernel.space(small, chip).why_invalid(config) or "")


def test_splash_blocks_of_both_passes_come_from_presets_in_the_librarys_type():
    from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes

    problem = SMALL["stock_splash"]
    forward = {"block_q": 256, "block_kv": 512, "block_kv_compute": 256}
    backward = {"block_q_dkv": 256, "block_kv_dkv": 512, "block_kv_dkv_compute": 128, "use_fused_bwd_kernel": True}
    with presets.using({"stock_splash": forward, "stock_splash_bwd": backward}):
        both = stock.splash_block_sizes(problem, device_kind="TPU v6 lite")
        alone = stock.splash_block_sizes(problem, device_kind="v6e", backward=False)
    assert both == BlockSizes(**forward, **backward)
    assert both.has_backward_blocks
    assert alone == BlockSizes(**forward)


def test_the_others_come_in_their_librarys_terms():
    configs = {
        "stock_flash": {"block_q": 256, "block_k_major": 512, "block_k": 256, "block_b": 1},
        "stock_gmm": {"tm": 256, "tk": 128, "tn": 384},
        "stock_matmul": {"block_m": 256, "block_n": 512, "block_k": 128},
        "stock_paged_attention": {"pages_per_compute_block": 4},
    }
    with presets.using(configs):
        flash = stock.flash_block_sizes(SMALL["stock_flash"], device_kind="v6e")
        assert dataclasses.asdict(flash) | configs["stock_flash"] == dataclasses.asdict(flash)
        assert stock.gmm_tiling(SMALL["stock_gmm"], device_kind="v6e") == (256, 128, 384)
        blocks = stock.matmul_blocks(SMALL["stock_matmul"], device_kind="v6e")
        assert blocks == {"block_shape": (256, 512), "block_k": 128}
        paged = stock.paged_attention_blocks(SMALL["stock_paged_attention"], device_kind="v6e")
        assert paged == {"pages_per_compute_block": 4, "megacore_mode": None}


def test_a_lookup_without_a_tpu_asks_for_which_and_is_noted():
    with requested() as asked, pytest.raises(ValueError, match="device_kind='v6e', or v4, v5e"):
        stock.splash_block_sizes(SMALL["stock_splash"])
    assert [request.kernel for request in asked] == ["stock_splash"]


def test_another_interface_of_the_backward_pass_is_said(monkeypatch):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as shipped

    monkeypatch.setattr(shipped, "_splash_attention_bwd", lambda only: only)
    kernel, problem = get_kernel("stock_splash_bwd"), SMALL["stock_splash_bwd"]
    verdict = validate(kernel, problem, kernel.baselines(problem, get_chip("v5e"))["default"])
    assert verdict.status is Status.LOWERING_ERROR
    assert "has another interface in jax" in verdict.message


def test_what_the_interpreter_cannot_run_is_said_and_refused():
    kernel = get_kernel("stock_ragged_paged_attention")
    problem = kernel.problems["jaxbench"].replace({"tokens": 64, "sequences": 2, "pages_per_seq": 4, "kv_len": 64})
    verdict = validate(kernel, problem, kernel.heuristic(problem, get_chip("v6e")))
    assert verdict.status is Status.LOWERING_ERROR
    assert "can be predicted, but not shown right" in verdict.message


@pytest.mark.slow
def test_the_ragged_reference_is_the_librarys_own():
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

    kernel = get_kernel("stock_ragged_paged_attention")
    problem = kernel.problem_type(
        tokens=24, sequences=3, heads=4, kv_heads=2, head_dim=128, page_size=8, pages_per_seq=4, kv_len=30
    )
    inputs = kernel.make_inputs(problem, 0)
    got = kernel.reference(problem)(*(x.astype("float32") if x.dtype == "bfloat16" else x for x in inputs))
    want = ref_ragged_paged_attention(*(x.astype("float32") if x.dtype == "bfloat16" else x for x in inputs))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "v6e") for name in STOCK), ("stock_splash", "v5e"), ("stock_splash_bwd", "v5e")],
)
def test_heuristics_compile_and_their_schedules_are_played(name, target):
    kernel, chip = get_kernel(name), get_chip(target)
    problem = kernel.problems[kernel.default_problem]
    with open_engine("compiler", Task(kernel, problem, chip), jobs=1, timeout_s=240) as engine:
        outcome = engine.evaluate(kernel.heuristic(problem, chip)).result()
    assert outcome.ok, outcome.message
    assert outcome.source is Source.SCHEDULE, outcome.message

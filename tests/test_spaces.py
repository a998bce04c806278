"""The spaces: candidates that fit the problem, constraints that say why, configs that a TPU compiler takes."""

import json
import os
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS, MIB
from autotune.errors import UsageError
from search_spaces._common import block_candidates, vmem_limits
from search_spaces.attention import AttentionKernel
from search_spaces.matmul import MatmulKernel

KERNELS = {kernel.name: kernel for kernel in (MatmulKernel(), AttentionKernel())}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_default_space_is_large_enumerable_and_holds_the_baseline(kernel, chip):
    problem = kernel.parse_problem(None)
    space = kernel.space(problem, chip)
    start = time.perf_counter()
    assert 40 < space.size < 50_000
    assert time.perf_counter() - start < 5
    baseline = kernel.baselines(problem, chip)["default"]
    assert space.why_invalid(baseline) is None
    assert set(baseline.values()) >= {128}
    best = min(space, key=lambda config: kernel.estimate_ms(problem, config, chip))
    assert kernel.estimate_ms(problem, best, chip) < kernel.estimate_ms(problem, baseline, chip) / 2


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300_000), align=st.sampled_from([8, 16, 128]))
def test_candidates_are_legal_blocks(size, align):
    found = block_candidates(size, align)
    assert found == tuple(sorted(set(found)))
    assert all(block == size or (block % align == 0 and 0 < block < size) for block in found)
    assert len(found) >= 5 or size < 1024
    assert all(size % block == 0 for block in found) or sum(size % block == 0 and block <= 4096 for block in found) < 5


def test_full_dimensions_and_odd_divisors_are_candidates():
    space = KERNELS["matmul"].space(KERNELS["matmul"].parse_problem("n=14336"), CHIPS["v5e"])
    assert {896, 1792, 3584, 14336} <= set(space.params["block_n"].candidates)
    assert 4096 in space.params["block_k"].candidates


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("fields", ["", "dtype=float32", "odd"])
def test_every_config_is_valid_or_says_why(name, fields):
    kernel = KERNELS[name]
    odd = {"matmul": "m=1001,n=777,k=5003", "attention": "q_len=1001,kv_len=5003"}[name]
    problem = kernel.parse_problem(odd if fields == "odd" else fields)
    space = kernel.space(problem, CHIPS["v5p"])
    rng = random.Random(0)
    for _ in range(300):
        config = {param.name: rng.choice(param.candidates) for param in space.params.values()}
        wild = {
            **config,
            rng.choice([n for n in config if n.startswith("block")]): rng.choice([0, -128, 1, 100, 10**6]),
        }
        for candidate in (config, wild):
            reason = space.why_invalid(candidate)
            assert reason is None or len(reason) > 20
        assert space.parse(config) == config


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("matmul", {"block_m": 0}, "block_m must be a positive multiple of 16 up to m=4096, or the whole 4096"),
        ("matmul", {"block_n": -128}, "block_n must be a positive multiple of 128 up to n=14336"),
        ("matmul", {"block_k": 100}, "block_k must be a positive multiple of 128"),
        ("matmul", {"block_m": 8192}, "up to m=4096"),
        ("matmul", {"held_buffers": 1}, "needs block_k to be the whole k=4096"),
        ("matmul", {"held_buffers": 0}, "held_buffers must be 1 or 2"),
        ("matmul", {"vmem_limit_mib": 4000}, "between 1 and the 128 MiB of VMEM that v5e has"),
        ("matmul", {"block_m": 4096, "block_n": 2048}, "the blocks alone need more VMEM than vmem_limit_mib"),
        ("attention", {"block_q": 0}, "block_q must be a positive multiple of 16 up to q_len=4096"),
        ("attention", {"block_kv": 0}, "block_kv must be a positive multiple of 128"),
        ("attention", {"block_kv_compute": 0}, "block_kv_compute must be block_kv itself or a positive multiple"),
        ("attention", {"block_q_compute": 40}, "block_q_compute must be block_q itself or a positive multiple of 16"),
        ("attention", {"block_q": 256, "block_q_compute": 96}, "block_q_compute must divide block_q"),
        ("attention", {"unroll": 0}, "unroll must be between 1 and 8"),
        (
            "attention",
            {"block_q": 4096, "block_q_compute": 4096, "block_kv": 512, "block_kv_compute": 512},
            "must be at most 1048576 scores",
        ),
        ("attention", {"block_kv": 384, "block_kv_compute": 256}, "block_kv_compute must divide block_kv"),
    ],
)
def test_broken_constraints_are_named(name, change, says):
    kernel = KERNELS[name]
    problem, chip = kernel.parse_problem(None), CHIPS["v5e"]
    space, config = kernel.space(problem, chip), {**kernel.baselines(problem, chip)["default"], **change}
    assert says in space.why_invalid(config)
    with pytest.raises(UsageError, match="=") as caught:
        space.check(config)
    assert says in str(caught.value)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_vmem_limits_start_with_the_default_and_stay_within_the_chip(chip):
    limits = vmem_limits(chip)
    assert limits[0] * MIB == chip.scoped_vmem_bytes
    assert max(limits) * MIB <= chip.vmem_bytes


@pytest.mark.parametrize("name", KERNELS)
def test_validation_problems_have_two_blocks_and_an_uneven_edge(name):
    kernel = KERNELS[name]
    problem = kernel.parse_problem(None)
    blocks = {
        "matmul": {"m": "block_m", "n": "block_n", "k": "block_k"},
        "attention": {"q_len": "block_q", "kv_len": "block_kv"},
    }
    for config in random.Random(1).sample(list(kernel.space(problem, CHIPS["v5e"])), 50):
        exact, *_, ragged = kernel.validation_problems(problem, config)
        for field, param in blocks[name].items():
            assert getattr(ragged, field) > config[param]
            assert getattr(ragged, field) % config[param]
            assert getattr(exact, field) % config[param] == 0
        assert exact.dtype == problem.dtype
        assert sum(spec.nbytes for spec in kernel.arguments(ragged)) < 512 * MIB


COMPILE = """
import json, sys
import jax
from jax.experimental import topologies
from autotune.chips import get_chip
from autotune.kernel import get_kernel

name, target, *configs = json.load(sys.stdin)
kernel, chip = get_kernel(name), get_chip(target)
device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
sharding = jax.sharding.SingleDeviceSharding(device)
for text, config in configs:
    problem = kernel.parse_problem(text)
    specs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in kernel.arguments(problem)]
    try:
        jax.jit(kernel.bind(problem, config)).lower(*specs).compile()
        print("ok")
    except Exception as error:
        print("vmem" if "ScopedVmemOom" in str(error) else repr(str(error)[:500]))
"""


def compile_all(name: str, target: str, configs: list) -> list[str]:
    """One verdict per (problem text, config), from the TPU compiler in a process of its own."""
    pytest.importorskip("libtpu")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], input=json.dumps([name, target, *configs]), env=env, capture_output=True,
        text=True, timeout=280, check=True,
    )  # fmt: skip
    return run.stdout.split("\n")[: len(configs)]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("matmul", ["m=512,n=512,k=512", "m=500,n=300,k=700", "m=500,n=300,k=700,dtype=float32"]),
        ("attention", ["heads=2,kv_heads=1,q_len=512,kv_len=512", "heads=1,kv_heads=1,q_len=333,kv_len=555"]),
    ],
)
def test_valid_configs_compile_for_v5e(name, texts):
    kernel, rng = KERNELS[name], random.Random(2)
    configs = [
        (text, rng.choice(list(kernel.space(kernel.parse_problem(text), CHIPS["v5e"])))) for text in texts for _ in "ab"
    ]
    assert set(compile_all(name, "v5e", configs)) <= {"ok", "vmem"}


@pytest.mark.parametrize("name", KERNELS)
def test_what_the_vmem_constraint_refuses_does_not_fit(name):
    """The constraint is a lower bound: the compiler refuses at least as much."""
    kernel, chip = KERNELS[name], CHIPS["v5e"]
    problem = kernel.parse_problem(None)
    space = kernel.space(problem, chip)
    blocks = {
        "matmul": {"block_m": 1024, "block_n": 1024, "block_k": 512},
        "attention": {"block_q": 512, "block_kv": 512},
    }
    config = space.parse(blocks[name])
    tight = max(limit for limit in range(1, 20) if space.why_invalid({**config, "vmem_limit_mib": limit}))
    assert compile_all(name, chip.name, [("", {**config, "vmem_limit_mib": tight})]) == ["vmem"]

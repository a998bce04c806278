"""The spaces: candidates that fit the problem, constraints that say why, configs that a TPU compiler takes."""

import json
import os
import random
import subprocess
import sys

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS, MIB
from autotune.errors import UsageError
from autotune.search.encoding import Encoding
from autotune.search.pool import Pool
from autotune.space import config_key
from search_spaces._common import block_candidates, vmem_limits
from search_spaces.attention import AttentionKernel
from search_spaces.matmul import MatmulKernel

KERNELS = {kernel.name: kernel for kernel in (MatmulKernel(), AttentionKernel())}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_default_space_is_large_enumerable_and_holds_the_baseline(kernel, chip):
    problem = kernel.parse_problem(None)
    space = kernel.space(problem, chip)
    assert 40 < space.size < 50_000
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
    assert 5 <= len(found) <= 12 or size < 1024
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


BLOCKED = {
    "matmul": {"m": "block_m", "n": "block_n", "k": "block_k"},
    "attention": {"q_len": "block_q", "kv_len": "block_kv"},
}
REAL = [
    ("matmul", ""),
    ("matmul", "dtype=float32"),
    ("matmul", "m=1001,n=777,k=5003"),
    ("attention", ""),
    ("attention", "llama3-70b-8k,batch=4,dtype=float32"),
    ("attention", "heads=8,kv_heads=8,q_len=1001,kv_len=5003,causal=false"),
]


@pytest.mark.parametrize(("name", "text"), REAL)
def test_validation_has_all_that_the_problem_has_in_reach_of_a_cpu(name, text):
    kernel = KERNELS[name]
    problem = kernel.parse_problem(text)
    for config in random.Random(1).sample(list(kernel.space(problem, CHIPS["v5e"])), 40):
        smalls = kernel.validation_problems(problem, config)
        for field, param in BLOCKED[name].items():
            size, block = getattr(problem, field), config[param]
            lengths = [getattr(small, field) for small in smalls]
            assert any(length > 2 * block and length % block for length in lengths), "three blocks and an uneven edge"
            own = [n for n in lengths if n % block == size % block and n >= min(size, 2 * block)]
            assert own, "the problem's own edge, and two blocks if it has them"
        if name == "attention":
            most = {field: max(getattr(small, field) for small in smalls) for field in ("batch", "kv_heads")}
            assert most == {field: min(2, getattr(problem, field)) for field in most}
            group = max(small.heads // small.kv_heads for small in smalls)
            assert group == min(3, problem.heads // problem.kv_heads)
        for small in smalls:
            assert small.dtype == problem.dtype
            assert kernel.cost(small).flops < 4e11
            assert sum(spec.nbytes for spec in kernel.arguments(small)) < 512 * MIB


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_huge_sizes_have_a_space_of_ordinary_size(name, chip):
    kernel = KERNELS[name]
    texts = {
        "matmul": ["m=1e9,n=1e9,k=1e9", "m=2147483647,n=735134400,k=2147483646"],
        "attention": ["q_len=735134400,kv_len=735134400", "heads=2147483647,kv_heads=1", "q_len=1,kv_len=2147483647"],
    }
    for text in texts[name]:
        problem = kernel.parse_problem(text)
        space = kernel.space(problem, chip)
        assert space.cardinality < 400_000
        config = next(iter(space))
        assert 0 < kernel.cost(problem).roofline_ms(chip) <= kernel.estimate_ms(problem, config, chip)
        assert space.why_invalid(kernel.heuristic(problem, chip)) is None


@settings(max_examples=30, deadline=None)
@given(q_len=st.integers(1, 60_000), chip=st.sampled_from(list(CHIPS.values())))
def test_every_block_candidate_has_a_tile(q_len, chip):
    kernel = KERNELS["attention"]
    space = kernel.space(kernel.parse_problem(f"q_len={q_len},kv_len={q_len}"), chip)
    for block in ("block_q", "block_kv"):
        tiles = space.params[f"{block}_compute"].candidates
        assert all(any(size % tile == 0 for tile in tiles) for size in space.params[block].candidates)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 9000) | st.integers(1, 200).map(lambda n: 128 * n),
    more=st.integers(0, 5000),
    head_dim=st.sampled_from([32, 64, 80, 128, 192, 256, 512]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_the_heuristic_is_valid_on_every_chip(size, more, head_dim, dtype):
    texts = {
        "matmul": f"m={size},n={size + more},k={more + 1},dtype={dtype}",
        "attention": f"q_len={size},kv_len={size + more},head_dim={head_dim},dtype={dtype}",
    }
    for name, kernel in KERNELS.items():
        problem = kernel.parse_problem(texts[name])
        for chip in CHIPS.values():
            assert kernel.space(problem, chip).why_invalid(kernel.heuristic(problem, chip)) is None


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("name", KERNELS)
def test_the_ranking_starts_with_programs_that_differ(name, chip):
    """The VMEM limit changes no estimate: among equals the smallest that may do comes first, and alone."""
    kernel = KERNELS[name]
    problem = kernel.parse_problem(None)
    space = kernel.space(problem, chip)
    pool = Pool(space, Encoding(space), lambda config: kernel.estimate_ms(problem, config, chip))
    program = [config_key({**config, "vmem_limit_mib": 0}) for config in pool.ranked(24)]
    assert len(set(program)) == 24
    first = {}
    for config in pool.configs:
        first.setdefault(config_key({**config, "vmem_limit_mib": 0}), config)
    limits = space.params["vmem_limit_mib"].candidates
    for config in first.values():
        smaller = [limit for limit in limits if limit < config["vmem_limit_mib"]]
        assert all(space.why_invalid({**config, "vmem_limit_mib": limit}) for limit in smaller)


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
        # The second where the limit is all the VMEM there is (v4).
        vmem = "ScopedVmemOom" in str(error) or "Exceeded vmem capacity" in str(error)
        print("vmem" if vmem else repr(str(error)[:500]))
"""


def compile_all(name: str, target: str, configs: list, **environment: str) -> list[str]:
    """One verdict per (problem text, config), from the TPU compiler in a process of its own."""
    pytest.importorskip("libtpu")
    env = {
        **os.environ,
        **environment,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], input=json.dumps([name, target, *configs]), env=env | environment,
        capture_output=True, text=True, timeout=280, check=True,
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
def test_a_users_default_precision_does_not_reach_the_compiler(name):
    """Mosaic refuses "highest" for bfloat16 operands."""
    kernel = KERNELS[name]
    text = {"matmul": "m=256,n=256,k=512", "attention": "heads=1,kv_heads=1,q_len=256,kv_len=256"}[name]
    configs = [
        (f"{text},dtype={dtype}", kernel.baselines(kernel.parse_problem(text), CHIPS["v5e"])["default"])
        for dtype in ("bfloat16", "float32")
    ]
    assert compile_all(name, "v5e", configs, JAX_DEFAULT_MATMUL_PRECISION="highest") == ["ok", "ok"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_programs_do_not_depend_on_the_default_precision(name, dtype):
    kernel = KERNELS[name]
    problem = kernel.parse_problem(f"dtype={dtype}")
    arrays = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in kernel.arguments(problem)]
    for function in (kernel.bind(problem, kernel.heuristic(problem, CHIPS["v4"])), kernel.reference(problem)):
        with jax.default_matmul_precision("highest"):
            highest = str(jax.make_jaxpr(function)(*arrays))
        jax.clear_caches()
        assert str(jax.make_jaxpr(function)(*arrays)) == highest
        jax.clear_caches()


@pytest.mark.slow
def test_the_smallest_chip_refuses_and_takes_what_it_should():
    """v4 has no more VMEM than kernels may use: it says so in other words."""
    kernel, chip = KERNELS["matmul"], CHIPS["v4"]
    problem = kernel.parse_problem(None)
    large = kernel.space(problem, chip).parse({"block_m": 4096, "block_n": 1024, "block_k": 1024})
    assert compile_all("matmul", "v4", [("", kernel.heuristic(problem, chip)), ("", large)]) == ["ok", "vmem"]
    kernel = KERNELS["attention"]
    assert compile_all("attention", "v4", [("", kernel.heuristic(kernel.parse_problem(None), chip))]) == ["ok"]


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

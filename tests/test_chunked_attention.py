"""Attention in chunks, by itself and as the tuner sees it: numerics, wrong texts, refusals, spaces, costs."""

import dataclasses
import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS, GIB, get_chip
from autotune.errors import UsageError
from autotune.kernel import get_kernel
from autotune.validation import validate
from kernels.chunked_attention import chunked
from kernels.chunked_attention.api import chunked_attention
from kernels.chunked_attention.chunked import Q_LOOPS, REMATS
from kernels.chunked_attention.cost import kept_bytes, peak_bytes, work
from kernels.chunked_attention.reference import with_gradients
from search_spaces.chunked_attention import ChunkedAttentionKernel
from tests.test_validation import REJECTED, rewrite

KERNEL = ChunkedAttentionKernel()
CPU = dataclasses.replace(get_chip("v5e"), name="cpu", device_kind="cpu", tflops={}, hbm_gbps=0.0)
ANY_CHIP = [*CHIPS.values(), CPU]
NAMES = [chip.name for chip in ANY_CHIP]
CHUNKS = {"q_chunk": 16, "kv_chunk": 16, "q_loop": "scan", "remat": "none"}


def operands(heads: int, kv_heads: int, q_len: int, kv_len: int, dtype: str = "float32", batch: int = 2, dim: int = 8):
    """q, k, v and a gradient of the result."""
    keys = jax.random.split(jax.random.key(q_len + kv_len), 4)
    shapes = [(batch, heads, q_len, dim), *[(batch, kv_heads, kv_len, dim)] * 2, (batch, heads, q_len, dim)]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def plain(q, k, v, grad, causal: bool = True, scale: float | None = None) -> list[np.ndarray]:
    """The result and the gradients of q, k and v from their definition, in float64."""
    kv_heads = k.shape[1]
    q, k, v, grad = (np.asarray(x, np.float64) for x in (q, k, v, grad))
    k, v = (np.repeat(x, q.shape[1] // kv_heads, axis=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * q @ np.swapaxes(k, 2, 3)
    if causal:
        rows, keys = np.indices(scores.shape[2:])
        scores = np.where(keys <= rows + k.shape[2] - q.shape[2], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    change = grad @ np.swapaxes(v, 2, 3)
    change = scale * weights * (change - np.sum(weights * change, axis=-1, keepdims=True))

    def per_kv_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(axis=2)

    dk, dv = np.swapaxes(change, 2, 3) @ q, np.swapaxes(weights, 2, 3) @ grad
    return [weights @ v, change @ k, per_kv_head(dk), per_kv_head(dv)]


def compiled(op, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The result and the gradients; compiled without care for speed, in half the time."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(with_gradients(op), compiler_options=options)(*arrays)


def assert_close(got, want, dtype="float32") -> None:
    """Within some roundings of the dtype, in the norm and in each element; zeros as zero as float32 makes them."""
    got = np.asarray(got, np.float64)
    tolerance = 2e-6 if dtype == "float32" else 2**-8
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want) + 1e-6 * np.sqrt(want.size)
    np.testing.assert_allclose(got, want, rtol=4 * tolerance, atol=4 * tolerance * max(np.abs(want).max(), 0.25))


ANY = {
    "kv_heads": st.integers(1, 2),
    "group": st.integers(1, 3),
    "q_len": st.integers(1, 40),
    "more": st.integers(0, 30),
    "q_chunk": st.sampled_from([8, 16, 64]),
    "kv_chunk": st.sampled_from([8, 16, 64]),
    "q_loop": st.sampled_from(Q_LOOPS),
    "remat": st.sampled_from(REMATS),
    "causal": st.booleans(),
    "scale": st.sampled_from([None, 0.7]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
}


@settings(max_examples=1, deadline=None, derandomize=True)
@given(**ANY)
@example(2, 3, 37, 0, 16, 8, "scan", "kv_step", True, None, "float32")
@example(1, 2, 33, 13, 8, 16, "scan", "q_chunk", True, 0.3, "bfloat16")
@example(1, 2, 25, 12, 16, 16, "unroll", "none", True, None, "float32")
def test_results_and_gradients_are_right(
    kv_heads, group, q_len, more, q_chunk, kv_chunk, q_loop, remat, causal, scale, dtype
):
    *arrays, grad = operands(group * kv_heads, kv_heads, q_len, q_len + more, dtype)
    config = {"q_chunk": q_chunk, "kv_chunk": kv_chunk, "q_loop": q_loop, "remat": remat}
    op = functools.partial(chunked_attention, causal=causal, scale=scale, config=config)
    found = compiled(op, *arrays, grad)
    for got, want in zip(found, plain(*arrays, grad, causal, scale), strict=True):
        assert got.dtype == dtype
        assert_close(got, want, dtype)


@pytest.mark.slow
def test_results_and_gradients_of_many_shapes_are_right():
    body = test_results_and_gradients_are_right.hypothesis.inner_test
    settings(max_examples=60, deadline=None)(given(**ANY)(body))()


@pytest.mark.slow
def test_fewer_keys_than_queries_without_a_mask():
    *arrays, grad = operands(2, 1, 40, 7)
    found = compiled(functools.partial(chunked_attention, causal=False, config=CHUNKS), *arrays, grad)
    for got, want in zip(found, plain(*arrays, grad, causal=False), strict=True):
        assert_close(got, want)


def test_large_scores_do_not_overflow():
    q, k, v, grad = operands(1, 1, 33, 33)
    q, k = 300 * q, 300 * k
    found = compiled(functools.partial(chunked_attention, config=CHUNKS), q, k, v, grad)
    assert all(bool(jnp.isfinite(x).all()) for x in found)
    np.testing.assert_allclose(found[0], plain(q, k, v, grad)[0], atol=1e-2)


def test_jit_vmap_and_grad():
    q, k, v, grad = operands(2, 1, 20, 24)

    def loss(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = chunked_attention(q, k, v, config=CHUNKS)
        return jnp.sum(grad * out), out

    by_q, out = jax.jit(jax.vmap(jax.grad(loss, has_aux=True)))(jnp.stack([q, 2 * q]))
    for i in range(2):
        want = plain((i + 1) * q, k, v, grad)
        assert_close(out[i], want[0])
        assert_close(by_q[i], want[1])


def test_inside_a_shard_map():
    """Its checks are on: what a loop begins with must vary over the devices as what comes of it does."""
    *arrays, _ = operands(2, 1, 20, 24)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    op = jax.shard_map(functools.partial(chunked_attention, config=CHUNKS), mesh=mesh, in_specs=spec, out_specs=spec)
    got = jax.jit(jax.grad(lambda *arrays: jnp.sum(op(*arrays))))(*arrays)
    assert_close(got, plain(*arrays, np.ones(arrays[0].shape))[1])


def test_without_a_config_it_takes_one_itself():
    *arrays, grad = operands(4, 2, 30, 50)
    assert_close(jax.jit(chunked_attention)(*arrays), plain(*arrays, grad)[0])


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 9, 4)),
        ((1, 2, 8, 4), (1, 2, 8, 5), (1, 2, 8, 5)),
        ((2, 8, 4), (2, 8, 4), (2, 8, 4)),
        ((1, 2, 8, 4), (3, 2, 8, 4), (3, 2, 8, 4)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, v):
    with pytest.raises(UsageError, match=r"must be \[batch, heads, q_len, head_dim\] and twice"):
        chunked_attention(jnp.ones(q), jnp.ones(k), jnp.ones(v))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q_chunk": 0}, "q_chunk=0: must be a positive integer"),
        ({"kv_chunk": 8.0}, "kv_chunk=8.0: must be a positive integer"),
        ({"q_loop": "map"}, "q_loop=map: must be unroll or scan"),
        ({"remat": "all"}, "remat=all: must be none, kv_step or q_chunk"),
        ({"block_q": 8}, "unknown 'block_q': use q_chunk, kv_chunk, q_loop or remat"),
    ],
)
def test_configs_without_a_meaning_are_refused(change, says):
    x = jnp.ones((1, 2, 8, 4))
    with pytest.raises(UsageError, match=says):
        chunked_attention(x, x, x, config={**CHUNKS, **change})


def test_dtypes_and_heads_that_do_not_fit_are_refused():
    x, narrow = jnp.ones((1, 3, 8, 4)), jnp.ones((1, 3, 8, 4), jnp.bfloat16)
    with pytest.raises(UsageError, match="must all be bfloat16 or float32"):
        chunked_attention(x, x, narrow)
    with pytest.raises(UsageError, match="kv_heads=2 does not divide heads=3"):
        chunked_attention(x, x[:, :2], x[:, :2])
    with pytest.raises(UsageError, match="q_len=8 exceeds kv_len=4"):
        chunked_attention(x, x[:, :, :4], x[:, :, :4])


# Validation: right configs pass, wrong texts do not.

SMALL = "head_dim=16,heads=2,kv_heads=1,q_len=64,kv_len=64"
RIGHT = [
    ("", {"remat": "kv_step"}),
    ("", {"q_loop": "unroll", "q_chunk": 32}),
    ("dtype=bfloat16", {"q_chunk": 32}),
    ("causal=false", {"remat": "q_chunk"}),
    ("kv_len=80", {"kv_chunk": 32, "q_loop": "unroll", "remat": "q_chunk"}),
    ("q_len=50,kv_len=50", {"kv_chunk": 50, "q_chunk": 50, "q_loop": "unroll"}),
]


@pytest.mark.parametrize(
    ("problem", "config"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i > 0)) for i, case in enumerate(RIGHT)],
)
def test_right_configs_pass(problem, config):
    verdict = validate(
        KERNEL, KERNEL.parse_problem(f"{SMALL},{problem}" if not problem else _over(problem)), {**CHUNKS, **config}
    )
    assert verdict.ok, verdict.message
    assert 0 < verdict.max_rel_error < verdict.tolerance


def _over(problem: str) -> str:
    """SMALL with these fields in place of its own."""
    fields = dict(pair.split("=") for pair in [*SMALL.split(","), *filter(None, problem.split(","))])
    return ",".join(f"{name}={value}" for name, value in fields.items())


UNROLL = {"q_loop": "unroll"}
# fmt: off
WRONG = {
    "mask one key further": ("key <= (first", "key <= 1 + (first", "", {}),
    "mask one key short": ("key <= (first + jnp", "key <= jnp.maximum(0, -1 + first + jnp", "", {}),
    "mask without the offset": ("jnp.arange(q.shape[-2]) + offset)", "jnp.arange(q.shape[-2]))", "kv_len=80", {}),
    "mask of the first query chunk": ("(first + jnp.arange(q", "(0 * first + jnp.arange(q", "", {}),
    "padded keys seen": ("seen = key < kv_len", "seen = key < kv_len + 1", "causal=false", {}),
    "last key chunk skipped": ("slice(unmasked, steps))", "slice(unmasked, max(1, steps - 1)))", "", {}),
    "last key chunk seen skipped": ("-(-last_sees // kv_chunk)", "max(1, last_sees // kv_chunk)", "", UNROLL),
    "one key chunk without a mask too many": ("first_sees // kv_chunk,", "-(-first_sees // kv_chunk),", "", UNROLL),
    "passed over too early": ("= chunk[0] * kv_chunk >", "= (chunk[0] + 1) * kv_chunk >", "", {}),
    "sums not rescaled": ("total * fade +", "total +", "", {}),
    "values not rescaled": ("out * fade[..., None] + more", "out + more", "", {}),
    "rescaled twice": ("jnp.exp(top - new_top)", "jnp.exp(jnp.minimum(top - new_top, 0.0)) ** 2", "", {}),
    "maximum of the last chunk": ("jnp.maximum(top, jax", "jnp.maximum(-jnp.inf, jax", "", {"kv_chunk": 8}),
    "gradient stopped at the scores": ("jnp.exp(scores", "jnp.exp(jax.lax.stop_gradient(scores)", "", {}),
    "gradient stopped at the sums": ("out / total[..., None]", "out / jax.lax.stop_gradient(total)[..., None]", "", {}),
    "gradient stopped at the running values": ("out * fade[", "jax.lax.stop_gradient(out) * fade[", "", {}),
    "half of the gradient": ("jnp.exp(scores", "jnp.exp(0.5 * (jax.lax.stop_gradient(scores) + scores)", "", {}),
    "scale left out": (", k) * scale", ", k)", "", {}),
    "scale of the keys' number": ("scale=head_dim**-0.5", "scale=kv_len**-0.5", "", {}),
    "keys for values": ("_chunks(v, kv_chunk)", "_chunks(k, kv_chunk)", "", {}),
    "first key chunk throughout": ("numbers[part], keys[part]", "numbers[part], keys[:1] + 0 * keys[part]", "", {}),
    "sums in bfloat16": ("x.astype(jnp.float32) for x", "x.astype(jnp.bfloat16) for x", "", {}),
    "not divided": ("return out / total[..., None]", "return out", "", {}),
}
# fmt: on
QUICK = {"mask one key further", "sums not rescaled", "gradient stopped at the sums"}


@pytest.mark.parametrize(
    ("old", "new", "problem", "config"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in WRONG.items()],
)
def test_wrong_texts_are_rejected(monkeypatch, old, new, problem, config):
    rewrite(monkeypatch, chunked, "chunked_attention_jax", old, new)
    verdict = validate(KERNEL, KERNEL.parse_problem(_over(problem)), {**CHUNKS, **config})
    assert verdict.status in REJECTED, verdict


@pytest.mark.parametrize("text", ["", "bert-base-512", "smollm2-135m-2k,q_len=1000", "llama3-8b-8k"])
def test_validation_has_all_that_the_problem_has_in_reach_of_a_cpu(text):
    problem = KERNEL.parse_problem(text)
    for config in itertools.islice(KERNEL.space(problem, CPU), 0, None, 5):
        smalls = KERNEL.validation_problems(problem, config)
        for of in "q", "kv":
            chunk, size = config[f"{of}_chunk"], getattr(problem, f"{of}_len")
            lengths = [getattr(small, f"{of}_len") for small in smalls]
            assert any(length > 2 * chunk and length % chunk for length in lengths) or chunk == size
            assert any(length % chunk == size % chunk for length in lengths)
        assert any(small.group == min(3, problem.group) and small.kv_heads > 1 for small in smalls)
        for small in smalls:
            assert (small.dtype, small.causal, small.head_dim) == (problem.dtype, problem.causal, problem.head_dim)
            assert small.batch * small.heads * small.q_len * small.kv_len <= 80_000_000


# The space and the costs.


def test_it_is_registered_for_every_platform():
    assert type(get_kernel("chunked_attention")) is ChunkedAttentionKernel
    assert tuple(KERNEL.platforms) == ("cpu", "gpu", "tpu")
    assert len(KERNEL.version) == 12


@pytest.mark.parametrize("chip", ANY_CHIP, ids=NAMES)
@pytest.mark.parametrize("name", KERNEL.problems)
def test_the_spaces_hold_the_baseline_and_the_heuristic(name, chip):
    problem = KERNEL.problems[name]
    space = KERNEL.space(problem, chip)
    assert 4 <= space.size <= 150
    for config in (KERNEL.baselines(problem, chip)["default"], KERNEL.heuristic(problem, chip)):
        space.check(config)
        assert space.parse(config) == config
    for config in space:
        assert 0 < KERNEL.estimate_ms(problem, config, chip) < 1e6


def test_the_default_space_is_of_a_size_and_within_a_gibibyte():
    problem = KERNEL.parse_problem(None)
    space = KERNEL.space(problem, CPU)
    assert 60 <= space.size <= 150
    assert all(peak_bytes(problem, config) < GIB for config in space)


@settings(max_examples=60, deadline=None)
@given(
    q_len=st.integers(1, 20_000),
    more=st.integers(0, 5000),
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    chip=st.sampled_from(ANY_CHIP),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_baseline_and_heuristic_are_valid_for_any_lengths(q_len, more, kv_heads, group, chip, dtype):
    problem = KERNEL.problem_type(
        batch=1, heads=group * kv_heads, kv_heads=kv_heads, q_len=q_len, kv_len=q_len + more, head_dim=64, dtype=dtype
    )
    space = KERNEL.space(problem, chip)
    for config in (KERNEL.baselines(problem, chip)["default"], KERNEL.heuristic(problem, chip)):
        space.check(config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q_chunk": 0}, "q_chunk must be between 1 and the queries' length of 1024"),
        ({"kv_chunk": 2048}, "kv_chunk must be between 1 and the keys' length of 1024"),
        ({"q_loop": "unroll", "q_chunk": 128}, "q_loop=unroll takes 4 query chunks at most"),
        ({"q_chunk": 1024}, "one query chunk is no loop"),
    ],
)
def test_broken_constraints_are_named(change, says):
    problem = KERNEL.parse_problem(None)
    config = {**KERNEL.baselines(problem, CPU)["default"], **change}
    assert says in KERNEL.space(problem, CPU).why_invalid(config)


def test_too_much_memory_is_named():
    problem = KERNEL.parse_problem("llama3-8b-8k")
    config = {"q_chunk": 4096, "kv_chunk": 4096, "q_loop": "unroll", "remat": "none"}
    assert "GiB beside the arrays" in KERNEL.space(problem, CPU).why_invalid(config)


def test_the_roofline_reads_and_writes_each_array_once():
    problem = KERNEL.parse_problem("batch=2,heads=6,kv_heads=2,q_len=5,kv_len=7,head_dim=3")
    results = jax.tree.leaves(jax.eval_shape(KERNEL.reference(problem), *KERNEL.arguments(problem)))
    nbytes = sum(spec.nbytes for spec in KERNEL.arguments(problem)) + sum(array.size * 4 for array in results)
    pairs = 2 * 6 * (3 + 4 + 5 + 6 + 7)
    assert (KERNEL.cost(problem).flops, KERNEL.cost(problem).nbytes) == (6 * 2 * 3 * pairs, nbytes)


def test_what_the_loops_do():
    problem = KERNEL.parse_problem("heads=1,kv_heads=1,q_len=40,kv_len=48")
    scan = {"q_chunk": 16, "kv_chunk": 16, "q_loop": "scan", "remat": "none"}
    assert dataclasses.astuple(work(problem, scan)) == (3, 9, 2 + 3 + 3, 256)
    assert dataclasses.astuple(work(problem, {**scan, "q_loop": "unroll"})) == (3, 8, 8, 256)
    kept = [kept_bytes(problem, {**scan, "remat": remat}) for remat in ("q_chunk", "kv_step", "none")]
    assert kept == sorted(kept)


def test_problems_load_no_jax():
    script = (
        "import sys, kernels.chunked_attention.cost, search_spaces.chunked_attention; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

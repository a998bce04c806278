"""The gated MLP and its gradients, by themselves and as the tuner sees them: numerics, wrong kernels, spaces, costs."""

import functools
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
from kernels.gated_mlp import PROBLEMS, gated_mlp
from kernels.gated_mlp.problem import ACTIVATIONS
from search_spaces.gated_mlp import GatedMlpBackwardKernel, GatedMlpDxKernel, GatedMlpKernel
from tests.test_spaces import compile_all
from tests.test_validation import NAN_MEMORY

KERNEL = GatedMlpKernel()
BACKWARD, DX = GatedMlpBackwardKernel(), GatedMlpDxKernel()
KERNELS = {kernel.name: kernel for kernel in (KERNEL, BACKWARD, DX)}
TILES = {"block_m": 32, "block_n": 128, "block_k": 128}
SQUARES = {**TILES, "block_m": 128}  # of the weights' gradients, too, whose rows are features


def operands(m: int, n: int, k: int, dtype: str = "float32") -> list[jax.Array]:
    """x, w_gate, w_up and a gradient of the result; gate and up are of standard size."""
    keys = jax.random.split(jax.random.key(m + n + k), 4)
    shapes = [(m, k), (k, n), (k, n), (m, n)]
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return [array.astype(dtype) for array in (arrays[0], *(w * k**-0.5 for w in arrays[1:3]), arrays[3])]


def activate(gate: np.ndarray, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """The activation and its derivative, from their definitions."""
    if activation == "silu":
        s = 1 / (1 + np.exp(-gate))
        return gate * s, s * (1 + gate * (1 - s))
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (gate + 0.044715 * gate**3))
    return gate * (1 + t) / 2, (1 + t) / 2 + gate * (1 - t**2) * c * (1 + 3 * 0.044715 * gate**2) / 2


def plain(x, w_gate, w_up, grad, activation: str) -> list[np.ndarray]:
    """The result and the gradients of x, w_gate and w_up, in float64."""
    x, w_gate, w_up, grad = (np.asarray(array, np.float64) for array in (x, w_gate, w_up, grad))
    up, (act, slope) = x @ w_up, activate(x @ w_gate, activation)
    by_gate, by_up = grad * up * slope, grad * act
    return [act * up, by_gate @ w_gate.T + by_up @ w_up.T, x.T @ by_gate, x.T @ by_up]


def assert_close(got, want, dtype) -> None:
    """Within some roundings of the dtype, in the norm and in each element."""
    got = np.asarray(got, np.float64)
    tolerance = 2e-6 if dtype == "float32" else 2**-7
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
    np.testing.assert_allclose(got, want, rtol=8 * tolerance, atol=8 * tolerance * np.abs(want).max())


@settings(max_examples=1, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 300),
    k=st.integers(1, 400),
    grid_order=st.sampled_from(["mn", "nm"]),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@example(m=70, n=200, k=300, grid_order="mn", activation="silu", dtype="float32")
@example(m=33, n=129, k=256, grid_order="nm", activation="gelu", dtype="bfloat16")
def test_results_and_gradients_of_any_shape_are_right_with_nan_memory(m, n, k, grid_order, activation, dtype):
    *arrays, grad = operands(m, n, k, dtype)
    config = {**TILES, "grid_order": grid_order}
    backward = {"bwd_config": config, "dx_config": config, "dw_config": {**SQUARES, "grid_order": grid_order}}
    op = functools.partial(gated_mlp, activation=activation, config=config, **backward, interpret=NAN_MEMORY)

    @jax.jit
    def run(*arrays):
        result, gradients = jax.vjp(op, *arrays)
        return result, *gradients(grad)

    for got, want in zip(run(*arrays), plain(*arrays, grad, activation), strict=True):
        assert got.dtype == dtype
        assert_close(got, want, dtype)


def test_jit_and_vmap_of_the_kernel():
    """In the plain interpreter: the TPU one refuses a batched grid."""
    *arrays, grad = operands(40, 130, 200)
    x, w_gate, w_up = (jnp.stack([array, 2 * array]) for array in arrays)
    got = jax.jit(jax.vmap(functools.partial(gated_mlp, config=TILES, interpret=True)))(x, w_gate, w_up)
    for i in range(2):
        assert_close(got[i], plain(x[i], w_gate[i], w_up[i], grad, "silu")[0], "float32")
    mapped = jax.jit(jax.vmap(functools.partial(gated_mlp, config=TILES)))
    assert "tpu_custom_call" in mapped.trace(x, w_gate, w_up).lower(lowering_platforms=("tpu",)).as_text()


def test_held_operand_with_one_buffer():
    *arrays, grad = operands(48, 256, 200)
    config = {"block_m": 16, "block_n": 128, "block_k": 200, "held_buffers": 1}
    got = gated_mlp(*arrays, config=config, interpret=NAN_MEMORY)
    assert_close(got, plain(*arrays, grad, "silu")[0], "float32")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_do_not_overflow(activation):
    x, w_gate, w_up, grad = operands(16, 128, 128)
    with np.errstate(over="ignore"):
        want = plain(300 * x, w_gate, w_up, grad, activation)[0]
    assert_close(gated_mlp(300 * x, w_gate, w_up, activation=activation), want, "float32")


def test_on_a_tpu_the_gradients_are_kernels():
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 384), (128, 384))]
    gradients = jax.jit(jax.grad(lambda *arrays: jnp.sum(gated_mlp(*arrays)), argnums=(0, 1, 2)))
    text = gradients.trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 4  # gate and up, x, and each weight; the result itself is not needed
    assert "dot_general" not in text


def test_runs_where_there_is_no_tpu():
    x, w_gate, w_up, grad = operands(6, 5, 7)
    want, by_x, by_gate, by_up = plain(x, w_gate, w_up, grad, "gelu")
    op = functools.partial(gated_mlp, activation="gelu")
    batched = jax.jit(jax.vmap(op, (0, None, None)))(jnp.stack([x, x]), w_gate, w_up)
    assert_close(batched[1], want, "float32")
    assert_close(op(x.reshape(2, 3, 7), w_gate, w_up).reshape(6, 5), want, "float32")
    gradients = jax.jit(jax.grad(lambda *arrays: jnp.sum(grad * op(*arrays)), argnums=(0, 1, 2)))(x, w_gate, w_up)
    for got, gradient in zip(gradients, (by_x, by_gate, by_up), strict=True):
        assert_close(got, gradient, "float32")


@pytest.mark.parametrize(
    ("x", "w_gate", "w_up"),
    [((4, 5), (6, 7), (6, 7)), ((5,), (5, 7), (5, 7)), ((4, 5), (5,), (5,)), ((4, 5), (5, 7), (5, 8))],
)
def test_shapes_that_do_not_fit_are_refused(x, w_gate, w_up):
    with pytest.raises(UsageError, match=r"must be \[\.\.\., m, k\] and twice \[k, n\]"):
        gated_mlp(jnp.ones(x), jnp.ones(w_gate), jnp.ones(w_up))


def test_dtypes_and_activations_that_do_not_fit_are_refused():
    x, narrow = jnp.ones((4, 4)), jnp.ones((4, 4), jnp.bfloat16)
    with pytest.raises(UsageError, match="must all be bfloat16 or float32"):
        gated_mlp(x, x, narrow)
    with pytest.raises(UsageError, match="activation=relu: must be silu or gelu"):
        gated_mlp(x, x, x, activation="relu")
    with pytest.raises(UsageError, match="activation=relu: must be silu or gelu"):
        KERNEL.parse_problem("activation=relu")


@pytest.mark.parametrize("text", ["", "dtype=float32", "m=1001,n=777,k=5003", "llama3-70b-prefill", "gemma-7b-decode"])
def test_validation_has_all_that_the_problem_has_in_reach_of_a_cpu(text):
    problem = KERNEL.parse_problem(text)
    for config in random.Random(1).sample(list(KERNEL.space(problem, CHIPS["v5e"])), 20):
        smalls = KERNEL.validation_problems(problem, config)
        for field in ("m", "n", "k"):
            size, block = getattr(problem, field), config[f"block_{field}"]
            lengths = [getattr(small, field) for small in smalls]
            assert any(length > 2 * block and length % block for length in lengths), "three blocks and an uneven edge"
            assert any(n % block == size % block and n >= min(size, 2 * block) for n in lengths), "the problem's edge"
        for small in smalls:
            assert (small.dtype, small.activation) == (problem.dtype, problem.activation)
            assert KERNEL.cost(small).flops < 4e11
            assert sum(spec.nbytes for spec in KERNEL.arguments(small)) < 768 * MIB


# The space and the costs.


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_are_registered(name):
    assert type(get_kernel(name)) is type(KERNELS[name])
    assert len(get_kernel(name).version) == 12


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_space_is_large_enumerable_and_holds_the_baseline(kernel, chip):
    problem = kernel.parse_problem(None)
    space, estimate_ms = kernel.space(problem, chip), kernel.estimate_ms
    assert 40 < space.size < 20_000
    baseline = kernel.baselines(problem, chip)["default"]
    assert space.why_invalid(baseline) is None
    assert [baseline[f"block_{field}"] for field in "mnk"] == [128, 128, 128]
    best = min(space, key=lambda config: estimate_ms(problem, config, chip))
    assert estimate_ms(problem, best, chip) < estimate_ms(problem, baseline, chip) / 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_m": 100}, "block_m must be a positive multiple of 16 up to m=4096, or the whole 4096"),
        ({"block_n": 0}, "block_n must be a positive multiple of 128 up to n=14336"),
        ({"held_buffers": 1}, "needs block_k to be the whole k=4096"),
        ({"block_m": 1024, "block_n": 1024, "block_k": 512}, "the blocks alone need more VMEM than vmem_limit_mib"),
    ],
)
def test_broken_constraints_are_named(change, says):
    problem, chip = KERNEL.parse_problem(None), CHIPS["v5e"]
    config = {**KERNEL.baselines(problem, chip)["default"], **change}
    assert says in KERNEL.space(problem, chip).why_invalid(config)


sizes = st.integers(1, 9000) | st.integers(1, 300).map(lambda n: 128 * n)


@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(["bfloat16", "float32"]))
def test_the_heuristic_is_valid_on_every_chip_and_no_estimate_beats_the_roofline(m, n, k, dtype):
    for kernel in KERNELS.values():
        problem = kernel.problem_type(m=m, n=n, k=k, dtype=dtype)
        for chip in CHIPS.values():
            config = kernel.heuristic(problem, chip)
            assert kernel.space(problem, chip).why_invalid(config) is None
            assert kernel.estimate_ms(problem, config, chip) >= 0.99 * kernel.cost(problem).roofline_ms(chip)


def test_the_roofline_reads_and_writes_each_array_once():
    for kernel in KERNELS.values():
        problem = kernel.problem_type(m=2, n=3, k=5, dtype="float32")
        results = jax.tree.leaves(jax.eval_shape(kernel.reference(problem), *kernel.arguments(problem)))
        nbytes = sum(spec.nbytes for spec in kernel.arguments(problem)) + sum(array.size * 4 for array in results)
        assert (kernel.cost(problem).flops, kernel.cost(problem).nbytes) == (4 * 2 * 3 * 5, nbytes)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_named_problems_are_ranked_alike(kernel):
    for problem in kernel.problems.values():
        for chip in CHIPS.values():
            configs = kernel.heuristic(problem, chip), kernel.baselines(problem, chip)["default"]
            ours, small = (kernel.estimate_ms(problem, config, chip) for config in configs)
            assert ours < small


def test_the_gradients_have_the_models_sizes():
    forward, dx = PROBLEMS["llama3-8b-prefill"], DX.problems["llama3-8b-prefill"]
    assert (dx.m, dx.n, dx.k) == (forward.m, forward.k, forward.n)
    assert BACKWARD.problems == PROBLEMS


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v4", "v5e"])
def test_heuristics_of_the_gradients_compile_within_16_mib(target):
    texts = ["m=2048,n=2048,k=2048", "m=500,n=300,k=700", "m=1024,n=1024,k=1024,dtype=float32"]
    for kernel in (BACKWARD, DX):
        configs = [(text, kernel.heuristic(kernel.parse_problem(text), CHIPS[target])) for text in texts]
        assert compile_all(kernel.name, target, configs) == ["ok"] * len(texts)


def test_the_compiler_takes_what_it_should_and_the_vmem_constraint_is_a_lower_bound():
    chip = CHIPS["v5e"]
    texts = ["m=500,n=300,k=700", "m=256,n=256,k=512,dtype=float32,activation=gelu"]
    configs = [(text, KERNEL.heuristic(KERNEL.parse_problem(text), chip)) for text in texts]
    problem = KERNEL.parse_problem("m=1024,n=512,k=512")
    space = KERNEL.space(problem, chip)
    config = space.parse({"block_m": 512, "block_n": 256, "block_k": 128})
    tight = max(limit for limit in range(1, 20) if space.why_invalid({**config, "vmem_limit_mib": limit}))
    configs.append((str(problem), {**config, "vmem_limit_mib": tight}))
    found = compile_all("gated_mlp", "v5e", configs, JAX_DEFAULT_MATMUL_PRECISION="highest")
    assert found == ["ok", "ok", "vmem"]


def test_problems_load_no_jax():
    script = "import sys, kernels.gated_mlp.cost, search_spaces.gated_mlp; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

"""The matmul's options: layouts, dtypes, epilogue and gradients; wrong texts of these, their spaces and costs."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS
from autotune.errors import UsageError
from autotune.validation import validate
from kernels.matmul import PROBLEMS, MatmulProblem, matmul, matmul_reference
from kernels.matmul import pallas as tiled
from kernels.matmul.cost import cost
from search_spaces.matmul import MatmulKernel
from tests.test_matmul import operands
from tests.test_spaces import compile_all
from tests.test_validation import NAN_MEMORY, REJECTED, rewrite

KERNEL = MatmulKernel()
SQUARES = {"block_m": 128, "block_n": 128, "block_k": 128}


def activate(x: np.ndarray, activation: str) -> np.ndarray:
    """The activations from their definitions."""
    return {
        "none": lambda x: x,
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
        "silu": lambda x: x / (1 + np.exp(-x)),
    }[activation](x)


def stored(x, y, transpose_lhs: bool, transpose_rhs: bool):
    return x.T if transpose_lhs else x, y.T if transpose_rhs else y


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 150),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    transpose_lhs=st.booleans(),
    transpose_rhs=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from(["none", "relu", "gelu", "silu"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"]),
    grid_order=st.sampled_from(["mn", "nm"]),
)
def test_any_option_is_right_with_nan_memory(
    m, n, k, transpose_lhs, transpose_rhs, bias, activation, dtype, grid_order
):
    x, y = operands(m, n, k, dtype)
    y = (y.astype(jnp.float32) * k**-0.5).astype(dtype)
    out = {"float32": "float32"}.get(dtype, "bfloat16")
    b = jax.random.normal(jax.random.key(n), (n,)).astype(out) if bias else None
    options = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs, "activation": activation}
    config = {**SQUARES, "grid_order": grid_order}
    got = matmul(*stored(x, y, transpose_lhs, transpose_rhs), b, **options, config=config, interpret=NAN_MEMORY)
    want = np.asarray(x, np.float64) @ np.asarray(y, np.float64) + (np.asarray(b, np.float64) if bias else 0.0)
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    assert got.dtype == out
    np.testing.assert_allclose(np.asarray(got, np.float64), activate(want, activation), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transposed", [False, True])
def test_integers_are_summed_exactly(transposed):
    x, y = (
        jax.random.randint(jax.random.key(i), s, -128, 128, jnp.int8) for i, s in enumerate([(150, 333), (333, 140)])
    )
    got = matmul(
        *stored(x, y, transposed, transposed),
        transpose_lhs=transposed, transpose_rhs=transposed, config=SQUARES, interpret=NAN_MEMORY,
    )  # fmt: skip
    assert got.dtype == "int32"
    np.testing.assert_array_equal(got, np.asarray(x, np.int64) @ np.asarray(y, np.int64))


@pytest.mark.parametrize(
    ("transpose_lhs", "transpose_rhs", "activation"),
    [
        (False, False, "gelu"),
        pytest.param(False, True, "none", marks=pytest.mark.slow),
        pytest.param(True, False, "relu", marks=pytest.mark.slow),
        (True, True, "silu"),
    ],
)
def test_gradients_are_kernels_of_their_own_shapes(transpose_lhs, transpose_rhs, activation):
    x, y = operands(40, 150, 200)
    arrays = *stored(x, y * 200**-0.5, transpose_lhs, transpose_rhs), jnp.linspace(-1, 1, 150)
    options = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs, "activation": activation}
    grad = jax.random.normal(jax.random.key(9), (40, 150))
    config = {**SQUARES, "block_m": 40 if transpose_lhs else 32}
    configs = {
        "config": config,
        "dx_config": SQUARES if transpose_lhs else {**SQUARES, "block_m": 32},
        "dy_config": SQUARES,
    }

    @jax.jit
    def run(*arrays):
        return jax.vjp(functools.partial(matmul, **options, **configs, interpret=NAN_MEMORY), *arrays)[1](grad)

    program = str(jax.make_jaxpr(run)(*arrays))
    assert program.count("name=matmul") == 3
    want = jax.vjp(functools.partial(matmul_reference, **options), *arrays)[1](grad)
    for got, right in zip(run(*arrays), want, strict=True):
        assert np.linalg.norm(got - right) < 1e-5 * np.linalg.norm(right)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_one_row_stored_transposed_lowers_for_a_tpu(dtype):
    x, y = jnp.ones((130, 40), dtype), jnp.ones((1, 40), dtype)
    traced = jax.jit(functools.partial(matmul, transpose_rhs=True)).trace(x, y)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert (matmul(x, y, transpose_rhs=True, config=SQUARES, interpret=NAN_MEMORY) == 40).all()
    with pytest.raises(UsageError, match="use transpose_rhs=false"):
        KERNEL.parse_problem(f"m=130,n=1,k=40,dtype={dtype},transpose_rhs=true")


def test_narrow_operands_have_no_gradient():
    x = jnp.ones((8, 8), "float8_e4m3fn")
    with pytest.raises(UsageError, match="float8_e4m3fn has no gradient: must be bfloat16 or float32"):
        jax.grad(lambda x: matmul(x, x).astype(jnp.float32).sum())(x)


def test_no_operand_is_transposed_in_memory():
    """What is lowered for a TPU has the operands as they are stored, and no transpose."""
    x, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (384, 256)))
    transposed = {"transpose_lhs": True, "transpose_rhs": True}
    traced = jax.jit(functools.partial(matmul, **transposed)).trace(x, y)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    ("x", "y", "bias", "options", "says"),
    [
        ((2, 4, 5), (5, 7), None, {"transpose_lhs": True}, r"must be \[k, m\] with \[k, n\]"),
        ((4, 5), (5, 7), None, {"transpose_rhs": True}, r"must be \[\.\.\., m, k\] with \[n, k\]"),
        ((4, 5), (5, 7), (8,), {}, r"a bias of float32\[8\]: must be float32\[7\]"),
        ((4, 5), (5, 7), None, {"activation": "tanh"}, "activation=tanh: must be none, relu, gelu or silu"),
    ],
)
def test_options_that_do_not_fit_are_refused(x, y, bias, options, says):
    with pytest.raises(UsageError, match=says):
        matmul(jnp.ones(x), jnp.ones(y), bias if bias is None else jnp.ones(bias), **options)


@pytest.mark.parametrize(("chip", "dtype"), [("v4", "int8"), ("v5e", "float8_e4m3fn"), ("v7x", "int8")])
def test_a_dtype_that_the_chip_lacks_is_refused(chip, dtype):
    with pytest.raises(UsageError, match=f"{chip} has no native {dtype} matmul: use bfloat16"):
        KERNEL.space(KERNEL.parse_problem(f"dtype={dtype}"), CHIPS[chip])


# Validation of the options; test_validation.py has the plain matmul's.

EPILOGUE = {"bias": True, "activation": "gelu"}
RIGHT = [
    {"dtype": "int8", "transpose_lhs": True},
    {"dtype": "float32", **EPILOGUE},
    *(
        pytest.param(fields, marks=pytest.mark.slow)
        for fields in (
            {"transpose_lhs": True, "transpose_rhs": True, **EPILOGUE},
            {"transpose_rhs": True, "activation": "relu"},
            {"dtype": "float8_e4m3fn", "bias": True},
            {"dtype": "float8_e5m2", "transpose_lhs": True, "activation": "silu"},
            {"dtype": "int8", "transpose_rhs": True},
        )
    ),
]


@pytest.mark.parametrize("fields", RIGHT)
def test_right_kernels_pass(fields):
    verdict = validate(KERNEL, KERNEL.parse_problem(None).replace(fields), SQUARES)
    assert verdict.ok, verdict.message
    assert (verdict.max_rel_error > 0) == (fields.get("dtype") != "int8")


# What is done to the kernel's text, and on which problem it matters.
X, Y, BIAS = "i, j, step: (i, step)", "i, j, step: (step, j)", "i, j, step: (0, j)"
ADD = "acc_ref[...] += dot(x_ref[...], y_ref[...], **transposed)\n\n    @pl"
STORE = "finish(acc_ref[...], *bias_ref)"
LHS, RHS = {"transpose_lhs": True}, {"transpose_rhs": True}
FLOAT32 = {"dtype": "float32", **EPILOGUE}
INT8 = {"dtype": "int8"}
WRONG = {
    "bias left out": ("if bias_ref is not None:", "if False:", FLOAT32),
    "bias twice": ("total += bias_ref[...]", "total += 2 * bias_ref[...]", FLOAT32),
    "bias rounded": ("bias_ref[...].astype(", "bias_ref[...].astype(jnp.bfloat16).astype(", FLOAT32),
    "bias of the first columns": (BIAS, "i, j, step: (0, 0)", FLOAT32),
    "bias of the first two blocks": (BIAS, "i, j, step: (0, jnp.minimum(j, 1))", FLOAT32),
    "bias of the row": (BIAS, "i, j, step: (0, i % 3)", FLOAT32),
    "bias after the activation": (
        "return ACTIVATIONS[activation](total)",
        "return ACTIVATIONS[activation](total - bias_ref[...]) + bias_ref[...]",
        FLOAT32,
    ),
    "bias and activation of each step": (
        ADD,
        ADD.replace("dot(", "finish(dot(").replace("ed)", "ed), *bias_ref)"),
        FLOAT32,
    ),
    "activation left out": ("ACTIVATIONS[activation](total)", "total", FLOAT32),
    "another activation": ("ACTIVATIONS[activation]", 'ACTIVATIONS["silu"]', FLOAT32),
    "activation rounded": ("[activation](total)", "[activation](total.astype(jnp.bfloat16))", FLOAT32),
    "epilogue left out": (STORE, "acc_ref[...]", {"bias": True}),
    "relu of another sign": ("ACTIVATIONS[activation](total)", "jnp.minimum(total, 0)", {"activation": "relu"}),
    "tail ignored, x transposed": ("tail=k % block_k", "tail=0", LHS),
    "tail ignored, y transposed": ("tail=k % block_k", "tail=0", RHS),
    "first two blocks of m, x transposed": (X, "i, j, step: (i % 2, step)", LHS),
    "first two blocks of k, x transposed": (X, "i, j, step: (i, step % 2)", LHS),
    "first two blocks of n, y transposed": (Y, "i, j, step: (step, j % 2)", RHS),
    "tile's row for its column, y transposed": (Y, "i, j, step: (step, jnp.minimum(i, 2))", RHS),
    "integers in 16 bits": (ADD, ADD.replace("ed)", "ed).astype(jnp.int16)"), INT8),
    "integers in bfloat16": (ADD, ADD.replace("ed)", "ed).astype(jnp.bfloat16).astype(jnp.int32)"), INT8),
    "last step of integers skipped": (ADD, ADD.replace("dot(", "(step < steps - 1) * dot("), INT8),
    "result in 8 bits": (STORE, f"{STORE}.astype(x_ref.dtype)", {"dtype": "float8_e4m3fn"}),
}
QUICK = {"bias of the first two blocks", "activation rounded", "tail ignored, x transposed", "integers in bfloat16"}


@pytest.mark.parametrize(
    ("old", "new", "fields"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in WRONG.items()],
)
def test_wrong_texts_are_rejected(monkeypatch, old, new, fields):
    rewrite(monkeypatch, tiled, "matmul_pallas", old, new)
    verdict = validate(KERNEL, KERNEL.parse_problem(None).replace(fields), SQUARES)
    assert verdict.status in REJECTED, verdict


# The space and the costs.

OPTIONS = [
    {},
    {"transpose_lhs": True, **EPILOGUE},
    {"transpose_rhs": True},
    {"transpose_lhs": True, "transpose_rhs": True, "dtype": "float32"},
    {"dtype": "int8", "transpose_lhs": True},
]
ODD = ["m=500,n=300,k=700", "m=77,n=333,k=200"]


@pytest.mark.parametrize(("target", "more"), [("v5e", []), ("v6e", [{"dtype": "float8_e5m2", **EPILOGUE}])])
def test_valid_configs_of_every_option_compile(target, more):
    rng, configs = random.Random(3), []
    for fields, text in itertools.product(OPTIONS + more, ODD):
        problem = KERNEL.parse_problem(text).replace(fields)
        configs.append((str(problem), rng.choice(list(KERNEL.space(problem, CHIPS[target])))))
    assert set(compile_all("matmul", target, configs)) == {"ok"}


def test_a_transposed_block_of_m_lies_along_the_lanes():
    for fields, align in (({}, 16), ({"dtype": "int8"}, 32), ({"transpose_lhs": True}, 128)):
        space = KERNEL.space(KERNEL.parse_problem("square-8k").replace(fields), CHIPS["v5e"])
        config = space.parse({**SQUARES, "block_m": 128 + align // 2})
        assert f"block_m must be a positive multiple of {align}" in space.why_invalid(config)


@pytest.mark.parametrize("fields", [{}, {"transpose_lhs": True}, {"bias": True, "activation": "relu"}])
def test_the_text_of_a_problem_names_what_it_has(fields):
    problem = MatmulProblem(m=2, n=3, k=5, **fields)
    assert str(problem) == ",".join(
        ["m=2,n=3,k=5,dtype=bfloat16", *(f"{name}={str(value).lower()}" for name, value in fields.items())]
    )
    assert KERNEL.parse_problem(str(problem)) == problem


def test_the_gradients_problems_are_those_of_their_forward_pass():
    up, dx, dw = (PROBLEMS[f"llama3-8b-mlp-up{part}"] for part in ("", "-dx", "-dw"))
    assert (dx.m, dx.n, dx.k, dx.transpose_rhs) == (up.m, up.k, up.n, True)
    assert (dw.m, dw.n, dw.k, dw.transpose_lhs) == (up.k, up.n, up.m, True)


def test_the_roofline_counts_the_results_own_dtype():
    work = cost(MatmulProblem(m=2, n=3, k=5, dtype="int8"))
    assert (work.flops, work.nbytes) == (60, 10 + 15 + 4 * 6)

"""Validation of the gated MLP and of its gradients: right kernels pass, wrong texts are rejected."""

import pytest

from autotune.validation import validate
from kernels.gated_mlp import pallas as tiled
from tests.test_gated_mlp import BACKWARD, DX, KERNEL, TILES
from tests.test_validation import REJECTED, rewrite

FLOAT32 = {"dtype": "float32"}
RIGHT = [
    (KERNEL, FLOAT32, {}),
    (BACKWARD, FLOAT32, {}),
    (DX, {}, {}),
    *(
        pytest.param(
            kernel,
            {"m": 100, "k": 200},
            {"block_k": 200, "grid_order": "nm", "held_buffers": 1},
            marks=pytest.mark.slow,
        )
        for kernel in (KERNEL, BACKWARD, DX)
    ),
    pytest.param(BACKWARD, {"activation": "gelu"}, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kernel", "problem", "config"), RIGHT)
def test_right_kernels_pass(kernel, problem, config):
    verdict = validate(kernel, kernel.parse_problem(None).replace(problem), {**TILES, **config})
    assert verdict.ok, verdict.message
    assert 0 < verdict.max_rel_error < verdict.tolerance


# What is done to the kernel's text, and on which problem it matters.
RESULT = "return (act(gate) * up,)"
SUM = "total[...] + last for"
X, WEIGHT, OUT = "i, j, step: (i, step)", "i, j, step: (step, j)", "i, j, step: (i, j)"
SLOPES = "return slope(grad * up)[0], grad * act"
FORWARD_WRONG = {
    "gate and up swapped": (RESULT, "return (act(up) * gate,)", {}),
    "gate and up swapped, bfloat16": (RESULT, "return (act(up) * gate,)", {"dtype": "bfloat16"}),
    "product missing": (RESULT, "return (act(gate),)", {}),
    "activation missing": (RESULT, "return (gate * up,)", {}),
    "activation of both": (RESULT, "return (act(gate * up),)", {}),
    "activation in bfloat16": (RESULT, "return (act(gate.astype(jnp.bfloat16)) * up,)", {}),
    "activation before the last step": (SUM, "jax.nn.silu(total[...]) + last for", {}),
    "activation of each step": ("so_far + more", "so_far + jax.nn.silu(more)", {}),
    "another activation": ("act = ACTIVATIONS[activation]", 'act = ACTIVATIONS["silu"]', {"activation": "gelu"}),
    "gate twice": ("right) for right in rights", "rights[0]) for right in rights", {}),
    "last k block skipped": (SUM, "total[...] for", {}),
    "middle k block skipped": ("step < steps - 1)", "step < steps - 2)", {}),
    "first k block twice": (X, "i, j, step: (i, jnp.maximum(step - 1, 0))", {}),
    "tail not cut": ("k % block_k or block_k", "block_k", {}),
    "sums not reset": ("step == 0, 0.0", "step < 0, 0.0", {}),
    "sums reset for the first tile alone": ("step == 0, 0.0", "(step == 0) & (pl.program_id(1) == 0), 0.0", {}),
    "sums rounded": ("so_far + more", "so_far + more.astype(jnp.bfloat16)", {}),
    "first two blocks of m": (X, "i, j, step: (i % 2, step)", {}),
    "first two blocks of n": (WEIGHT, "i, j, step: (step, j % 2)", {}),
    "first two blocks of n, whole k": (WEIGHT, "i, j, step: (step, j % 2)", {"k": 128}),
    "first two blocks of the result": (OUT, "i, j, step: (jnp.minimum(i, 1), j)", {}),
}
BACKWARD_WRONG = {
    "gradients swapped": (SLOPES, "return grad * act, slope(grad * up)[0]", {}),
    "slope of another activation": ("vjp(ACTIVATIONS[activation]", 'vjp(ACTIVATIONS["silu"]', {"activation": "gelu"}),
    "slope missing": (SLOPES, "return grad * up, grad * act", {}),
    "up missing": (SLOPES, "return slope(grad)[0], grad * act", {}),
    "gradient missing": (SLOPES, "return slope(up)[0], grad * act", {}),
    "gate for its activation": (SLOPES, "return slope(grad * up)[0], grad * gate", {}),
    "slope at up": ("activation], gate)\n", "activation], up)\n", {}),
    "gradient in bfloat16": (SLOPES, "return slope(grad * up)[0].astype(jnp.bfloat16), grad * act", {}),
    "last k block skipped": (SUM, "total[...] for", {}),
    "tail not cut": ("k % block_k or block_k", "block_k", {}),
    "sums not reset": ("step == 0, 0.0", "step < 0, 0.0", {}),
    "first two blocks of m": (X, "i, j, step: (i % 2, step)", {}),
    "first two blocks of the tiles": (OUT, "i, j, step: (i, jnp.minimum(j, 1))", {}),
    "gradient of the first rows": ("tile[...].astype(", "tile[0:1, :].astype(", {}),
}
DX_WRONG = {
    "gate's product alone": ("map(times, lefts, rights)", "map(times, lefts[:1], rights)", {}),
    "up's product alone": ("map(times, lefts, rights)", "map(times, lefts[1:], rights[1:])", {}),
    "weights swapped": ("map(times, lefts, rights)", "map(times, lefts, rights[::-1])", {}),
    "difference": ("operator.add", "operator.sub", {}),
    "last k block skipped": (SUM, "total[...] for", {}),
    "middle k block skipped": ("step < steps - 1)", "step < steps - 2)", {}),
    "tail not cut": ("k % block_k or block_k", "block_k", {}),
    "sum not reset": ("step == 0, 0.0", "step < 0, 0.0", {}),
    "sum rounded": ("so_far + more", "so_far + more.astype(jnp.bfloat16)", {}),
    "first two blocks of n": (WEIGHT, "i, j, step: (step, j % 2)", {}),
    "first two blocks of k": (X, "i, j, step: (i, step % 2)", {}),
}


# One of a kind; the rest is left to the slow run.
QUICK = {
    "gated_mlp: gate and up swapped",
    "gated_mlp: activation before the last step",
    "gated_mlp: tail not cut",
    "gated_mlp_bwd: slope at up",
    "gated_mlp_bwd: gradient of the first rows",
    "gated_mlp_dx: weights swapped",
    "gated_mlp_dx: sum not reset",
}
CASES = {
    f"{kernel.name}: {name}": (kernel, *case)
    for kernel, wrong in ((KERNEL, FORWARD_WRONG), (BACKWARD, BACKWARD_WRONG), (DX, DX_WRONG))
    for name, case in wrong.items()
}


@pytest.mark.parametrize(
    ("kernel", "old", "new", "problem"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in CASES.items()],
)
def test_wrong_texts_are_rejected(monkeypatch, kernel, old, new, problem):
    rewrite(monkeypatch, tiled, f"{kernel.name}_pallas", old, new)
    verdict = validate(kernel, kernel.parse_problem(None).replace({**FLOAT32, **problem}), TILES)
    assert verdict.status in REJECTED, verdict

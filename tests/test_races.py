"""No kernel touches memory that another core or a transfer is not done with, as the interpreter's detector sees it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.chips import CHIPS
from autotune.kernel import get_kernel, kernel_names

# The detector's finding is private to jax; tried on 0.10.2 and 0.12.0.
interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
# Two cores share a "parallel" dimension, as on v4 and v5p.
DETECTING = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
QUICK = ("attention_bwd", "matmul")
# Those in plain JAX have no memory of their own to race for; those that others ship are theirs to mend.
OWN = [name for name in kernel_names() if get_kernel(name).sources[0].startswith("kernels.")]
PALLAS = [name for name in OWN if get_kernel(name).platforms == ("tpu",)]


def races(run, *arrays) -> bool:
    try:
        jax.block_until_ready(run(*arrays))
    except Exception as error:  # As newer ones of jax say it.
        pltpu.reset_tpu_interpret_mode_state()
        if "RACE DETECTED" in str(error):
            return True
        raise
    state = interpreter.get_races() if hasattr(interpreter, "get_races") else interpreter.races
    assert state is not None, "the detector did not run"
    return state.races_found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in PALLAS]
)
def test_no_kernel_races(name):
    kernel, chip = get_kernel(name), CHIPS["v5e"]
    problem = kernel.parse_problem("dtype=float32")
    config = kernel.baselines(problem, chip)["default"]
    small = min(kernel.validation_problems(problem, config), key=lambda one: kernel.cost(one).flops)
    assert not races(kernel.bind(small, config, interpret=DETECTING), *kernel.make_inputs(small, 0))


@pytest.mark.parametrize(("semantics", "found"), [("parallel", True), ("arbitrary", False)])
def test_blocks_that_two_cores_both_write_are_found(semantics, found):
    """Sums over a dimension: right if one core walks it, a race if two share it."""

    @functools.partial(
        pl.pallas_call,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        interpret=DETECTING,
    )
    def add_up(x_ref, out_ref):
        out_ref[...] += x_ref[...]

    assert races(add_up, jnp.ones((32, 128))) == found

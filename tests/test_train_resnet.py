"""ResNet-50's train step: the model itself, its space and arithmetic, and what the TPU compiler makes of it.

What all models have in common, numerics under any config among it, is tested in `tests.test_train_step`.
"""

from __future__ import annotations

import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autotune.chips import CHIPS
from autotune.engines import Task, open_engine
from autotune.errors import UsageError
from autotune.outcome import Source
from kernels.train_step import initial_state, plan, resnet, train_step
from kernels.train_step import resnet_cost as model
from kernels.train_step.mesh import parameter_spec
from kernels.train_step.models import BottleneckShape
from kernels.train_step.placement import Placement
from kernels.train_step.problem import PROBLEMS, TrainProblem
from kernels.train_step.remat import RESNET_POLICIES
from tests.conftest import ROOT
from tests.test_train_step import KERNEL, config_of, needs_compiler

PROBLEM = PROBLEMS["resnet50"]
V5E = CHIPS["v5e"]


def test_the_model_has_the_published_size():
    """25.56 million parameters, 4.09 thousand million multiplications with the stride in the 3x3 convolution."""
    *parameters, images, labels = KERNEL.arguments(PROBLEM)
    count = sum(math.prod(spec.shape) for spec in parameters)
    assert count == PROBLEM.shape.parameters == 25_557_032
    assert model.multiplications(PROBLEM) == 4_089_184_256
    assert (images.shape, images.dtype) == ((1024, 224, 224, 3), "bfloat16")
    assert (labels.shape, labels.dtype) == ((1024,), "int32")
    assert KERNEL.cost(PROBLEM).flops == pytest.approx(6 * 4.089e9 * 1024 / 8, rel=0.02)


def quickly(function, *arguments):
    """Compiled without optimizations, which take longer than what they save here."""
    lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


def test_a_block_is_what_other_layers_give():
    """Against Flax's convolutions and BatchNorms, with the same parameters."""
    shape = BottleneckShape(16, 8, 2)
    block = resnet.Bottleneck(shape, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(2), (4, 7, 7, 16))

    def both(x):
        seen, rngs = {}, nnx.Rngs(1)

        def normalized(x, conv):
            how = {"strides": conv.stride, "padding": conv.size // 2, "use_bias": False}
            layer = nnx.Conv(conv.inputs, conv.outputs, (conv.size, conv.size), **how, rngs=rngs)
            layer.kernel[...] = getattr(block, conv.name)[...]
            norm = nnx.BatchNorm(conv.outputs, momentum=0.0, epsilon=resnet.EPS, rngs=rngs)
            out = norm(layer(x))
            seen[f"{conv.name}_norm"] = {"mean": norm.mean[...], "var": norm.var[...]}
            return out

        first, second, third, shortcut = shape.convolutions()
        out = normalized(nnx.relu(normalized(nnx.relu(normalized(x, first)), second)), third)
        return block(x, Placement("float32")), (nnx.relu(out + normalized(x, shortcut)), seen)

    got, want = quickly(both, x)(x)
    assert got[0].shape == (4, 4, 4, 32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got, want)


def test_a_step_learns_and_averages_the_batch_statistics():
    problem = TrainProblem(model="resnet-tiny", batch=8, image=16, topology="cpu:1", dtype="float32")
    batch, state = quickly(lambda: (resnet.random_batch(problem, 0), initial_state(problem)))()
    stem = resnet.convolved(batch[0], state["parameters"]["stem"], problem.shape.stem, Placement("float32"))
    config = config_of("resnet-tiny-cpu,topology=cpu:1", **RESNET_POLICIES["save_convs"])
    step = quickly(train_step(problem, config, jax.devices()[:1])[0], state, batch)
    state, first = step(state, batch)
    observed = state["statistics"]["stem_norm"]
    np.testing.assert_allclose(observed["mean"], 0.1 * stem.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(observed["var"], 0.9 + 0.1 * stem.var((0, 1, 2)), rtol=1e-4)
    state, _ = step(state, batch)
    _, third = step(state, batch)
    assert float(third) < float(first)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("resnet50,seq_len=128", "seq_len=128: resnet50 has none: use seq_len=none,image=224"),
        ("llama3-1b,image=224", "image=224: llama3-1b has none: use image=none,seq_len=4096"),
        ("resnet50,model=llama3-1b", "seq_len=none: llama3-1b needs it"),
        ("tiny,seq_len=none", "seq_len=none: tiny needs it: give seq_len, as in seq_len=4096"),
        ("resnet50,image=0", "image=0: must be a positive integer"),
    ],
)
def test_sizes_of_another_model_are_refused(text, says):
    with pytest.raises(UsageError, match=says):
        KERNEL.parse_problem(text)


def test_images_are_as_large_as_usual_where_nothing_is_said():
    problem = TrainProblem(model="resnet50", batch=1024, topology="v5e:2x4")
    assert problem == PROBLEM == TrainProblem.from_dict(PROBLEM.to_dict())
    assert str(problem) == "model=resnet50,batch=1024,image=224,topology=v5e:2x4,dtype=bfloat16"
    assert KERNEL.parse_problem(str(problem)) == problem
    other = KERNEL.parse_problem("llama3-1b,model=resnet50")
    assert (other.image, other.seq_len) == (224, None)


def test_the_space_has_what_a_resnet_has():
    space = KERNEL.space(PROBLEM, V5E)
    remat = {f"remat_{name}" for name in ("block_input", "conv1", "conv2", "conv3", "normed")}
    assert set(space.params) == {"data", "fsdp", *remat, "scoped_vmem_mib", "async_collectives"}
    assert 1000 < space.size < 10_000
    assert "the 8 devices of v5e:2x4" in space.why_invalid(config_of("resnet50", fsdp=4))
    assert "must divide the batch of 12" in KERNEL.space(PROBLEM.replace({"batch": 12}), V5E).why_invalid(
        config_of("resnet50")
    )
    with pytest.raises(UsageError, match="unknown parameter 'accumulate'"):
        space.parse({"accumulate": 2})


def test_estimates_rise_and_fall_as_they_should():
    """The less is computed again, the more is kept; what does not fit is slow, and no default."""
    configs = [config_of("resnet50", **remat) for remat in RESNET_POLICIES.values()]
    peaks = [model.peak_bytes(PROBLEM, config) for config in configs]
    flops = [model.step_flops(PROBLEM, config) for config in configs]
    times = [KERNEL.estimate_ms(PROBLEM, config, V5E) for config in configs]
    assert peaks == sorted(peaks)
    assert flops == sorted(flops, reverse=True)
    assert times == sorted(times, reverse=True)
    assert flops[-1] == KERNEL.cost(PROBLEM).flops
    assert KERNEL.heuristic(PROBLEM, V5E) == configs[-1]
    large = PROBLEM.replace({"batch": 4096})
    default = KERNEL.heuristic(large, V5E)
    assert model.peak_bytes(large, default) < V5E.hbm_bytes < model.peak_bytes(large, configs[-1])
    assert KERNEL.estimate_ms(large, default, V5E) < KERNEL.estimate_ms(large, configs[-1], V5E) / 2


def test_a_plan_says_how_a_resnet_is_trained():
    problem = PROBLEMS["resnet-tiny-cpu"].replace({"topology": "cpu:1"})
    how = plan(problem, config_of("resnet-tiny-cpu,topology=cpu:1"), jax.devices()[:1])
    assert dict(how.mesh.shape) == dict.fromkeys(("data", "fsdp", "tensor", "sequence"), 1)
    state = jax.eval_shape(lambda: initial_state(problem))
    shardings = how.shardings(state)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    assert all(isinstance(one, NamedSharding) for one in jax.tree.leaves(shardings))
    assert callable(how.checkpoint_policy)
    sizes = {"fsdp": 8, "tensor": 1}
    assert parameter_spec("conv2", (3, 3, 64, 64), sizes) == P(None, None, None, ("fsdp",))
    assert parameter_spec("classifier", (2048, 1000), sizes) == P(("fsdp",), None)


def test_problems_and_spaces_load_no_jax():
    script = "import sys, kernels.train_step.problem, search_spaces.train_step; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_compiler_predicts_resnet50():
    """It fits eight chips, in about the memory that the arithmetic says, and has a time."""
    config = config_of("resnet50", **RESNET_POLICIES["full"])
    with open_engine("compiler", Task(KERNEL, PROBLEM, V5E), jobs=1, timeout_s=1200) as engine:
        outcome = engine.evaluate(config).result()
    assert outcome.ok, outcome.message
    assert outcome.source is Source.HLO, outcome.message
    assert outcome.time_ms > KERNEL.cost(PROBLEM).roofline_ms(V5E)
    assert outcome.peak_bytes == pytest.approx(model.peak_bytes(PROBLEM, config), rel=0.4)

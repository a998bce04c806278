"""The train step: its numerics under any config, its space, and what the TPU compiler makes of it."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.chips import CHIPS, get_chip
from autotune.engines import Task, open_engine
from autotune.engines.compiler.support import why_unsupported, worker_environment
from autotune.engines.device import hardware, programs
from autotune.engines.device.engine import DeviceEngine
from autotune.errors import UsageError
from autotune.kernel import get_kernel
from autotune.outcome import Source, Status
from kernels.train_step import transformer_cost as model
from kernels.train_step.problem import PROBLEMS, TrainProblem
from kernels.train_step.remat import POLICIES, RESNET_CHOSEN, choices
from search_spaces._train_family import AXES
from search_spaces.train_step import compiler_options, fitted
from tests.conftest import ROOT

KERNEL = get_kernel("train_step")
needs_compiler = pytest.mark.skipif(why_unsupported() is not None, reason="no TPU compiler here")
PROBLEM = "llama3-1b"
EIGHT = "llama3-8b,topology=v5e:4x4,batch=16,seq_len=4096"


def config_of(problem: str = PROBLEM, **changes) -> dict:
    instance = KERNEL.parse_problem(problem)
    return {**KERNEL.baselines(instance, get_chip(instance.target))["default"], **changes}


def verdicts(jobs: list[dict]) -> list[dict]:
    """What `tests.train_step_child` says; eight devices need a process of their own."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",  # compiles sooner
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    jobs = [{"problem": PROBLEM, "breaks": "none", **job} for job in jobs]
    run = subprocess.run(
        [sys.executable, "-m", "tests.train_step_child"],
        env=env, input=json.dumps(jobs), capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


# Together they have every word of every parameter, every axis of the mesh, both kinds of embeddings; and a resnet.
CASES = [
    {"config": config_of()},
    {
        "problem": "llama3-8b",
        "config": config_of(
            "llama3-8b", data=1, fsdp=2, tensor=2, sequence=2, scan_group=2, norm="kernel", mlp="kernel",
            **POLICIES["minimal_offloaded"], 
        ),
    },
    {
        "config": config_of(
            data=4, fsdp=1, tensor=1, sequence=4, attention="xla", accumulate=2, loss="kernel", scan_layers=False,
            **POLICIES["save_attention"],
        )
    },
    {"config": config_of(data=2, fsdp=2, tensor=4, attention="chunked", loss="xla", **POLICIES["full_offloaded"])},
    {
        "problem": "resnet50",
        "config": config_of(
            "resnet50", data=2, fsdp=4, **choices(RESNET_CHOSEN, block_input="offload", conv1="save", normed="offload")
        ),
    },
]  # fmt: skip

BROKEN = [
    {"breaks": "psum", "config": config_of()},
    {"breaks": "mean", "config": config_of(accumulate=2)},
    {"breaks": "micro", "config": config_of(accumulate=2)},
    {"breaks": "length", "config": config_of(fsdp=8, sequence=2)},
    {"breaks": "remat", "config": config_of()},
    {"breaks": "own", "problem": "resnet50", "config": config_of("resnet50")},
    {"breaks": "constant", "problem": "resnet50", "config": config_of("resnet50")},
    {"breaks": "remat", "problem": "resnet50", "config": config_of("resnet50")},
]


@pytest.mark.parametrize("cases", [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.slow)], ids=["some", "others"])
def test_configs_give_the_references_loss_and_gradients(cases):
    for case, found in zip(cases, verdicts(cases), strict=True):
        assert found["status"] == "ok", (case, found)
        assert found["error"] < 1e-5


@pytest.mark.slow
def test_broken_steps_are_rejected():
    for case, found in zip(BROKEN, verdicts(BROKEN), strict=True):
        assert found["status"] == "wrong_result", (case["breaks"], found)


def drawn(draw: st.DrawFn) -> dict:
    """A job with any valid config of any problem."""
    name = draw(st.sampled_from(sorted(PROBLEMS)))
    space = KERNEL.space(PROBLEMS[name], get_chip(PROBLEMS[name].target))
    rng = random.Random(draw(st.integers(0, 2**32)))
    while True:
        config = {param.name: rng.choice(param.candidates) for param in space.params.values()}
        if space.why_invalid(config) is None:
            return {"problem": name, "config": config}


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.composite(drawn)(), min_size=6, max_size=6))
def test_drawn_configs_give_the_references_loss_and_gradients(jobs):
    for job, found in zip(jobs, verdicts(jobs), strict=True):
        assert found["status"] == "ok", (job, found)
        assert found["error"] < 1e-5


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.composite(drawn)())
def test_configs_fit_their_validation(job):
    """Eight devices or fewer, no axis lost that could be kept, and everything divides."""
    problem, config = PROBLEMS[job["problem"]], job["config"]
    for small in KERNEL.validation_problems(problem, config):
        fit = fitted(small, config)
        axes = [axis for axis in AXES if axis in config]
        used = math.prod(fit[axis] for axis in axes)
        assert (used <= 8, small.dtype, type(small.shape)) == (True, "float32", type(problem.shape))
        assert getattr(small.shape, "tied", None) == getattr(problem.shape, "tied", None)
        assert fitted(small, fit) == fit
        space = KERNEL.space(small.replace({"topology": f"cpu:{used}"}), get_chip("cpu"))
        assert space.why_invalid({**fit, "scoped_vmem_mib": 0}) is None
        assert all(fit.get(name) == config.get(name) for name in ("accumulate", "scan_group"))
        assert all((config[axis] > 1) >= (fit[axis] > 1) for axis in axes)
        assert sum(fit[axis] > 1 for axis in axes) >= min(2, sum(config[axis] > 1 for axis in axes))


@pytest.mark.parametrize("name", PROBLEMS)
def test_default_is_valid_and_is_what_an_empty_config_says(name):
    problem = PROBLEMS[name]
    chip = get_chip(problem.target)
    space = KERNEL.space(problem, chip)
    default = KERNEL.baselines(problem, chip)["default"]
    assert space.why_invalid(default) is None
    assert space.parse({}) == default == KERNEL.heuristic(problem, chip)
    assert all(param.default is not None and param.doc for param in space.params.values())
    roofline = KERNEL.cost(problem).roofline_ms(chip)
    assert roofline is None or roofline < KERNEL.estimate_ms(problem, default, chip)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fsdp": 8}, "must be the 16 devices"),
        ({"fsdp": 1, "tensor": 16}, "8 key heads"),
        ({"fsdp": 2, "sequence": 8, "tensor": 1, "data": 1}, None),
        ({"fsdp": 2, "sequence": 4, "tensor": 2}, None),
        ({"fsdp": 1, "sequence": 4, "tensor": 4}, "exchanged for heads"),
        ({"fsdp": 1, "sequence": 4, "tensor": 4, "attention": "xla"}, None),
        ({"fsdp": 8, "tensor": 2, "loss": "kernel"}, "whole vocabulary"),
        ({"accumulate": 8}, "each device's share"),
        ({"scan_group": 3}, "16 layers"),
        ({"scoped_vmem_mib": 128}, "less than the VMEM of v5e"),
        ({"data": 0}, "at least 1"),
    ],
)
def test_what_does_not_fit_is_said(change, says):
    problem = PROBLEMS[PROBLEM]
    reason = KERNEL.space(problem, CHIPS["v5e"]).why_invalid(config_of(**change))
    assert reason is None if says is None else says in reason


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "gpt"}, "must be .*llama3-1b"),
        ({"topology": "v9:2x2"}, "must begin with .*v5e"),
        ({"topology": "v5e:4x4x4"}, "2 sides, as in v5e:4x4"),
        ({"topology": "v5p:4x4"}, "3 sides"),
        ({"topology": "cpu:2x2"}, "a number of devices, as in cpu:8"),
        ({"topology": "v5e"}, "2 sides"),
        ({"topology": "v5e:0x4"}, "2 sides"),
        ({"batch": 0}, "positive"),
        ({"dtype": "int8"}, "bfloat16"),
    ],
)
def test_problems_that_are_none_are_refused(fields, says):
    with pytest.raises(UsageError, match=says):
        PROBLEMS[PROBLEM].replace(fields)


def test_devices_and_topologies():
    problem = KERNEL.parse_problem("llama3-8b,topology=v7x:2x2x1")
    assert (problem.target, problem.devices, KERNEL.topology(problem)) == ("v7x", 8, "tpu7x:2x2x1")
    cpu = PROBLEMS["tiny-cpu"]
    assert (cpu.target, cpu.devices, KERNEL.topology(cpu)) == ("cpu", 8, None)
    assert compiler_options(cpu, config_of("tiny-cpu")) == {}


@pytest.mark.parametrize(("name", "billions"), [("llama3-1b", 1.236), ("llama3-8b", 8.030), ("llama3-70b", 70.55)])
def test_models_have_the_published_numbers_of_parameters(name, billions):
    problem = TrainProblem(model=name, batch=1, seq_len=128)
    arguments = KERNEL.arguments(problem)
    count = sum(math.prod(spec.shape) for spec in arguments[:-1])
    assert count == problem.shape.parameters == pytest.approx(billions * 1e9, rel=1e-3)
    assert arguments[-1].shape == (1, 129)


def test_a_mesh_that_is_larger_than_the_machine_says_what_to_do():
    problem = PROBLEMS["tiny-cpu"]
    many = config_of("tiny-cpu", data=1, fsdp=8 * len(jax.devices()))
    with pytest.raises(UsageError, match="set XLA_FLAGS=--xla_force_host_platform_device_count="):
        KERNEL.compilable(problem, many, jax.devices())


def test_estimate_prefers_what_fits_and_less_work():
    problem, chip = KERNEL.parse_problem(EIGHT), CHIPS["v5e"]

    def estimate(**changes) -> float:
        return KERNEL.estimate_ms(problem, config_of(EIGHT, **changes), chip)

    everything = config_of(EIGHT, **POLICIES["minimal"])
    assert model.peak_bytes(problem, everything) > chip.hbm_bytes
    assert estimate(**POLICIES["minimal"]) > 3 * estimate()
    assert estimate(async_collectives=False) > estimate()
    assert estimate(attention="xla") > estimate()
    flops = [sum(model.step_flops(problem, config_of(EIGHT, **remat))) for remat in POLICIES.values()]
    assert flops == sorted(flops, reverse=True)


COMPILE = """
import dataclasses, json, sys, warnings
warnings.simplefilter("ignore")
from jax.experimental import topologies
from autotune.kernel import get_kernel
from autotune.outcome import Source, Status
from kernels.train_step import models
models.MODELS["tiny"] = dataclasses.replace(models.MODELS["tiny"], **json.loads(sys.argv[1]))
kernel, found = get_kernel("train_step"), []
for fields, config in json.load(sys.stdin):
    problem = kernel.parse_problem(fields)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=kernel.topology(problem)).devices
    program = kernel.compilable(problem, config, devices)
    lowered = program.function.lower(*program.arguments)
    compiled = lowered.compile(compiler_options=dict(program.options))
    memory, text = compiled.memory_analysis(), lowered.as_text()
    found.append({
        "flops": compiled.cost_analysis()["flops"], "temp": memory.temp_size_in_bytes,
        "host": memory.host_temp_size_in_bytes, "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes, "kernels": text.count("tpu_custom_call"), "devices": len(devices),
    })
print(json.dumps(found))
"""


def compiled(jobs: list[tuple[str, dict | None]], **shape: int) -> list[dict]:
    """Compiles each job's whole step for its topology, of a tiny model with some of its `shape` changed."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(shape)],
        env={**os.environ, **worker_environment(), "LIBTPU_INIT_ARGS": ""},
        input=json.dumps(jobs), capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@needs_compiler
@pytest.mark.slow
def test_programs_compile_for_devices_that_are_not_there():
    """Kernels are kernels there, parameters are shared, the state is donated, and any option is known."""
    fields = "tiny,topology=v5e:4x4,batch=16"
    config = config_of(fields, scoped_vmem_mib=32, async_collectives=False, norm="kernel", loss="kernel")
    jobs = [(fields, config), ("tiny", config_of("tiny", data=1, fsdp=2, tensor=2)), ("tiny", None)]
    first, second, plain = compiled(jobs)
    assert (first["devices"], second["devices"], plain["kernels"]) == (16, 4, 0)
    assert first["kernels"] > second["kernels"] >= 2
    assert first["arguments"] < second["arguments"]
    assert all(found["aliased"] > 0.9 * found["arguments"] for found in (first, second, plain))


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_less_is_computed_again_the_more_is_kept():
    """Along the named policies operations fall and memory rises; what is offloaded lies on the host."""
    fields = "tiny,seq_len=1024,batch=8"
    shape = {"width": 256, "mlp": 1024, "heads": 4, "kv_heads": 4, "head_dim": 128}
    on_device = [name for name, remat in POLICIES.items() if "offload" not in remat.values()]
    # Dense attention: XLA counts no operations of Pallas kernels. And no loop, whose body it counts once.
    plain = {"attention": "xla", "scan_layers": False}
    jobs = [(fields, config_of(fields, **plain, **POLICIES[name])) for name in on_device]
    found = compiled(jobs, **shape)
    flops, temp = ([one[what] for one in found] for what in ("flops", "temp"))
    assert flops == sorted(flops, reverse=True)
    assert temp == sorted(temp)
    assert flops[-1] < 0.9 * flops[0]
    assert temp[-1] > 1.5 * temp[0]
    jobs = [(fields, config_of(fields, **POLICIES[name])) for name in ("minimal_offloaded", "minimal", "save_qkv")]
    away, kept, again = compiled(jobs, **shape, layers=32)  # many more than are on their way to the host at a time
    assert away["kernels"] == kept["kernels"] == again["kernels"] - 1  # the forward kernel is not run again
    assert away["host"] > 0 == kept["host"]
    assert away["temp"] < kept["temp"]


@needs_compiler
@pytest.mark.slow
def test_the_compiler_engine_predicts_a_whole_step():
    problem = KERNEL.parse_problem("tiny,seq_len=1024")
    task = Task(KERNEL, problem, get_chip("v5e"))
    with open_engine("compiler", task, jobs=1, timeout_s=None) as engine:
        assert engine.timeout_s == KERNEL.timeout_s
        outcome = engine.evaluate(config_of("tiny,seq_len=1024")).result()
        assert outcome.ok, outcome.message
        assert outcome.source is Source.HLO, outcome.message
        assert outcome.time_ms > KERNEL.cost(problem).roofline_ms(task.chip)
        assert outcome.collective_ms > 0
        assert outcome.peak_bytes > sum(spec.nbytes for spec in KERNEL.arguments(problem)) / problem.devices
        assert engine.validate(config_of("tiny,seq_len=1024")).result().ok


@needs_compiler
def test_what_does_not_fit_says_what_it_needs():
    """Eight billion parameters with their moments on four chips of 16 GiB: 8 · 12 / 4 GB, and more to work with."""
    problem = KERNEL.parse_problem("llama3-8b,topology=v5e:2x2,batch=4,seq_len=2048")
    with open_engine("compiler", Task(KERNEL, problem, get_chip("v5e")), jobs=1, timeout_s=None) as engine:
        outcome = engine.evaluate(KERNEL.heuristic(problem, get_chip("v5e"))).result()
    assert outcome.status is Status.HBM_OOM, outcome.message[:300]
    assert outcome.peak_bytes > 8.03e9 * 12 / 4
    assert 0 < outcome.over_bytes < outcome.peak_bytes


@needs_compiler
def test_a_topology_that_the_compiler_lacks_is_named():
    problem = KERNEL.parse_problem("tiny,topology=v5e:3x5,batch=15")
    with open_engine("compiler", Task(KERNEL, problem, get_chip("v5e")), jobs=1, timeout_s=None) as engine:
        outcome = engine.evaluate(KERNEL.heuristic(problem, get_chip("v5e"))).result()
    assert outcome.status is Status.COMPILE_ERROR
    assert "the compiler has no topology v5e:3x5" in outcome.message


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rest"), [("tiny-cpu", {"fsdp": 2, "tensor": 2}), ("resnet-tiny-cpu", {"fsdp": 4})])
def test_the_device_engine_times_a_step_on_eight_devices(name, rest, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    problem = PROBLEMS[name]
    with DeviceEngine(
        Task(KERNEL, problem, get_chip("cpu")), hardware.Attached("cpu", "cpu", 1), jobs=2, timeout_s=300
    ) as engine:
        assert engine.jobs == 1  # one process has all the devices
        config = config_of(name, data=2, **rest)
        outcome = engine.evaluate(config).result()
        assert outcome.measured, outcome.message
        assert outcome.time_ms > 0
        assert engine.validate(config).result().ok
        race = engine.race([config, None], seconds=0.5, seed=3).result()
        assert race.ok, race.message
        wide = engine.evaluate(config_of(name, data=2, fsdp=8)).result()
        assert wide.status is Status.LOWERING_ERROR


@pytest.mark.slow
def test_the_device_engine_times_the_whole_step_on_one_device_too():
    """State in, state out: also what the optimizer does. Inputs wait with the host, none are overwritten."""
    problem = KERNEL.parse_problem("tiny-cpu,topology=cpu:1,batch=2")
    config = KERNEL.baselines(problem, get_chip("cpu"))["default"]
    program = programs.load(KERNEL, problem, config, seed=0)
    state, loss = (KERNEL.compilable(problem, config, jax.devices()[:1]).arguments[0], 1)
    before = [array.copy() for array in program.inputs.sets[0]]
    for _ in program.inputs.sets:
        results = jax.tree.leaves(program.call(*program.next_arguments()))
    assert len(results) == len(jax.tree.leaves(state)) + loss
    assert all(np.array_equal(one, other) for one, other in zip(before, program.inputs.sets[0], strict=True))
    assert not program.inputs.restore()
    programs.forget_programs()


@pytest.mark.slow
def test_the_example_trains_with_a_preset(tmp_path):
    """What a preset says is what it runs with, and the loss falls."""
    config = config_of("tiny-cpu", data=2, fsdp=4, accumulate=2)
    script = (
        "import runpy, sys; from autotune import presets; sys.argv = ['train_sharded.py', '--steps', '20']\n"
        f"with presets.using({{'train_step': {config!r}}}):\n"
        "    runpy.run_path('examples/train_sharded.py', run_name='__main__')"
    )
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-c", script], env={**env, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    first, *lines = run.stdout.splitlines()
    assert first == "mesh {'data': 2, 'fsdp': 4, 'tensor': 1, 'sequence': 1}"
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.5

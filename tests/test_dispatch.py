"""Which config a kernel's public function takes."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from autotune import presets
from autotune.chips import get_chip
from autotune.engines.compiler.support import why_unsupported, worker_environment
from autotune.kernel import get_kernel
from autotune.problem import Problem
from kernels import _dispatch
from kernels.chunked_attention import chunked_attention

CONFIG = {"q_chunk": 64, "kv_chunk": 32, "q_loop": "scan", "remat": "kv_step"}


@pytest.mark.skipif(jax.default_backend() == "tpu", reason="there all kernels take their presets")
def test_a_kernel_for_any_device_takes_what_was_measured_on_this_one(monkeypatch):
    taken = []

    def record(q, k, v, **options):
        taken.append({name: options[name] for name in CONFIG})
        return q

    monkeypatch.setattr("kernels.chunked_attention.api.chunked_attention_jax", record)
    q = jax.numpy.zeros((1, 1, 128, 64), jax.numpy.float32)
    with presets.using({"chunked_attention": CONFIG}):
        chunked_attention(q, q, q)
    assert taken == [CONFIG]
    assert _dispatch.choose_config("matmul", Problem(), None, lambda: {"its": "heuristic"}) == {"its": "heuristic"}


def test_the_command_that_tunes_for_such_a_device_measures():
    kernel = get_kernel("chunked_attention")
    problem = kernel.problems[kernel.default_problem]
    assert " --engine device " in presets.tune_command(kernel, problem, get_chip("cpu"))
    assert " --target v5e " in presets.tune_command(kernel, problem, get_chip("v5e"))


def test_a_preset_that_was_measured_on_another_machine_is_warned_of(tmp_path, monkeypatch):
    kernel = get_kernel("chunked_attention")
    problem = kernel.problems[kernel.default_problem]
    preset = presets.Preset(
        kernel="chunked_attention",
        device_kind="cpu",
        problem=problem.to_dict(),
        config={**CONFIG, "q_chunk": 256},
        time_ms=1.0,
        source=presets.MEASURED,
        validation={"status": "ok"},
        versions={"kernel": kernel.version, "machine": "Another CPU, 96 cores"},
    )
    presets.save(tmp_path / "presets" / "cpu" / "chunked_attention.json", preset)
    monkeypatch.setenv("AUTOTUNE_PRESETS", str(tmp_path / "presets"))
    with pytest.warns(presets.PresetWarning, match="measured on another machine, Another CPU, 96 cores"):
        assert presets.lookup("chunked_attention", problem, device_kind="cpu") == preset.config


@pytest.mark.skipif(why_unsupported() is not None, reason="no TPU compiler here")
def test_in_a_shard_map_the_chip_is_its_meshs_forward_and_backward():
    """Also where that is devices of a compiler only: their presets are taken, not this machine's."""
    done = subprocess.run(
        [sys.executable, "-c", MESH], env={**os.environ, **worker_environment(), "LIBTPU_INIT_ARGS": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["None", "v6e", "v6e", "None"]


MESH = """
import jax
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P
from kernels._dispatch import attached_chip

def say(x):
    print(getattr(attached_chip(), "name", None))
    return x

op = jax.custom_vjp(lambda x: x)
op.defvjp(lambda x: (say(x), None), lambda _, grad: (say(grad),))
devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
mesh = jax.sharding.Mesh(devices, ("x",))
sharded = jax.shard_map(op, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
spec = jax.ShapeDtypeStruct((8, 128), "float32", sharding=jax.sharding.NamedSharding(mesh, P("x")))
say(0)
jax.jit(jax.grad(lambda x: sharded(x).sum())).lower(spec).compile()
say(0)
"""

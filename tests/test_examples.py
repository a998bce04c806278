"""The examples, as a reader runs them: in processes of their own, outside the repository."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from autotune.engines.compiler.support import why_unsupported, worker_environment
from autotune.kernel import get_kernel
from tests.conftest import ROOT

TRAIN = ROOT / "examples" / "train.py"


def here(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    """Runs ``examples/train.py`` in this process, and in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(TRAIN), *arguments])
    runpy.run_path(str(TRAIN), run_name="__main__")


def trained(folder: Path, *arguments: str, python: str = sys.executable, path: str = str(ROOT)) -> dict[int, float]:
    """The loss that a process of its own printed at each step."""
    done = subprocess.run(
        [python, str(TRAIN), *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(done.stdout)


def losses(said: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", said, re.M)}


def leaves(workdir: Path, step: int) -> list[np.ndarray]:
    """All numbers of a checkpoint."""
    with ocp.CheckpointManager(workdir) as checkpoints:
        state = checkpoints.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_a_run_in_two_parts_is_the_run_in_one_and_its_loss_falls(tmp_path, monkeypatch, capsys):
    here(monkeypatch, tmp_path, "--steps", "20", "--workdir", "whole")
    whole = losses(capsys.readouterr().out)
    assert whole[20] < whole[10] - 0.5
    here(monkeypatch, tmp_path, "--steps", "10", "--workdir", "parts")
    parts = losses(capsys.readouterr().out)
    # The other process compiles as this one does (tests/conftest.py): the numbers are to be the same to the bit.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    assert {**parts, **trained(tmp_path, "--steps", "10", "--workdir", "parts")} == whole
    for one, other in zip(leaves(tmp_path / "whole", 20), leaves(tmp_path / "parts", 20), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_the_example_refuses(tmp_path, monkeypatch, capsys):
    other = tmp_path / "other.txt"
    other.write_text("No such thing. " * 20)
    here(monkeypatch, tmp_path, "--steps", "1", "--text", str(other))
    for arguments, right in (
        ((), "train-run: was begun with another text or model; give another --workdir"),
        (("--text", "none.txt"), "no such text: none.txt; give --text FILE"),
        (("--target", "v9"), "use v4, v5e, v5p, v6e or v7x"),
        (("--steps", "-1"), "invalid count value"),
    ):
        with pytest.raises(SystemExit) as stopped:
            here(monkeypatch, tmp_path, *arguments)
        assert stopped.value.code == 2
        assert right in capsys.readouterr().err


def test_what_the_example_takes_on_a_chip_that_is_not_here(tmp_path, monkeypatch, capsys):
    here(monkeypatch, tmp_path, "--steps", "0", "--target", "v5e")
    out = capsys.readouterr().out
    assert jax.default_backend() == "tpu" or "every kernel runs its plain-JAX reference" in out
    asked = {"attention", "attention_bwd", "cross_entropy", "cross_entropy_dw", "cross_entropy_dx", "gated_mlp"}
    asked |= {"gated_mlp_bwd", "gated_mlp_dx", "matmul", "rmsnorm", "rmsnorm_bwd"}
    found = re.findall(r"^  (\w+) (\S+)\n    (.+)$", out, re.M)
    assert {kernel for kernel, _, _ in found} == asked
    assert {how for _, _, how in found} == {f"its preset, in {ROOT / 'examples' / 'presets'}"}
    for kernel, problem, _ in found:
        assert get_kernel(kernel).parse_problem(problem).dtype == "bfloat16"
    here(monkeypatch, tmp_path, "--steps", "0", "--target", "v4")
    assert re.search(
        r"untuned\n    tune it: python -m autotune \w+ --target v4 --problem \S+$", capsys.readouterr().out, re.M
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(why_unsupported() is not None, reason="no TPU compiler here")
def test_the_whole_step_compiles_for_v5e():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(TRAIN)],
        env={**os.environ, **worker_environment(), "LIBTPU_INIT_ARGS": "", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 11, "each kernel that it asks for is a Mosaic kernel"


COMPILE = """
import runpy, sys, jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
example = runpy.run_path(sys.argv[1])
state, step = example["training"](sizes := example["Sizes"](), jnp.bfloat16)
mesh = Mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[:1], "x")
sharding = NamedSharding(mesh, PartitionSpec())
tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length + 1), jnp.int32)
place = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
text = jax.jit(step).lower(place(state), place(tokens)).compile().as_text()
print(text.count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_the_wheel_alone_in_a_fresh_environment_it_trains_fifty_steps(tmp_path):
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(ROOT)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    python = str(tmp_path / "fresh" / "bin" / "python")
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([python, *pip[1:], "install", str(wheel)], check=True)
    said = trained(tmp_path, python=python, path="")
    assert said[50] < said[10] - 1

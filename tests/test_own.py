"""Kernels of one's own: decorated functions, in modules, scripts and other packages."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import venv
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autotune
from autotune import presets
from autotune.chips import get_chip
from autotune.engines.compiler.support import why_unsupported
from autotune.errors import UsageError
from autotune.own.problem import OwnProblem
from autotune.presets import Preset
from tests import own_functions
from tests.conftest import ROOT

needs_compiler = pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))
X = jax.ShapeDtypeStruct((4096, 256), "float32")
shapes = st.lists(st.integers(1, 4096), max_size=4)
option_values = st.one_of(st.booleans(), st.integers(-5, 5), st.floats(-1e3, 1e3), st.sampled_from(["a", "gelu"]))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_PRESETS", raising=False)


@given(
    arrays=st.lists(
        st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "int32", "int8"])), min_size=1, max_size=4
    ),
    options=st.dictionaries(st.sampled_from(["causal", "scale", "kind"]), option_values),
)
def test_a_problem_says_all_of_a_call_in_text(arrays, options):
    problem = OwnProblem.of([jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in arrays], options)
    assert [(list(spec.shape), spec.dtype) for spec in problem.specs] == [(shape, dtype) for shape, dtype in arrays]
    assert problem.keywords == options
    assert OwnProblem.from_dict(problem.to_dict()) == problem


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ([{"a": 1}], {}, "argument 0 is a dict"),
        ([jnp.zeros(3)], {"mask": jnp.zeros(3)}, "mask is a "),
        ([jnp.zeros(3, complex)], {}, "with a dtype of"),
    ],
)
def test_what_is_no_call_of_a_tunable_function_is_said(arrays, options, words):
    with pytest.raises(UsageError, match=words):
        OwnProblem.of(arrays, options)


def test_a_space_may_depend_on_the_arrays_and_be_constrained():
    kernel = own_functions.scale.kernel
    wide = OwnProblem.of([jax.ShapeDtypeStruct((64, 4096), "float32")], {})
    space = kernel.space(wide, get_chip("v5e"))
    assert space.params["block"].candidates == (8, 32)
    assert [config["block"] for config in space] == [8]
    assert space.why_invalid({"block": 32}) == "a block must have at most 65536 elements"
    assert kernel.summary == "x times a factor, in blocks of rows."


def test_a_decorator_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="has no argument tile"):
        autotune.tunable({"tile": [1]})(lambda x: x)
    with pytest.raises(UsageError, match="default=b"):
        autotune.tunable({"a": [1]}, default={"b": 1})(lambda x, a: x)


def test_a_call_takes_the_preset_or_what_the_caller_says():
    x = jnp.arange(512 * 256, dtype=jnp.float32).reshape(512, 256)
    kernel, problem = own_functions.running_sum.kernel, OwnProblem.of([x], {})
    preset = Preset(
        kernel="running_sum",
        device_kind="cpu",
        problem=problem.to_dict(),
        config={"way": "right", "chunk": 128},
        time_ms=1.0,
        validation={"status": "ok"},
        versions={"kernel": kernel.version},
    )
    presets.save(presets.preset_path(Path("results/presets"), "cpu", "running_sum"), preset)
    with jax.default_device(jax.devices("cpu")[0]), warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(jax.jit(own_functions.running_sum)(x), jnp.cumsum(x, axis=1), rtol=1e-5)
    explained = own_functions.running_sum.explain(x, device_kind="cpu")
    assert explained.match.how == "exact"
    wrong = own_functions.running_sum(x, way="wrong", chunk=64)
    assert not np.allclose(wrong, jnp.cumsum(x, axis=1))


def test_a_kernel_for_tpus_gives_way_to_its_reference_elsewhere():
    x = jnp.ones((64, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is looked up for a CPU
        np.testing.assert_array_equal(jax.jit(lambda x: own_functions.scale(x, factor=3.0))(x), 3 * x)
    np.testing.assert_array_equal(own_functions.scale(x, factor=3.0, interpret=True, off=1.0), 3 * x + 1)


@needs_compiler
def test_a_function_is_tuned_for_a_tpu_that_is_not_here():
    result = own_functions.scale.tune(X, target="v5e", trials=4)
    assert result.best.config["block"] > 8
    assert result.speedup("default") > 1.2
    assert result.best.validation.ok
    assert own_functions.scale.explain(X, device_kind="v5e").match.config == result.best.config


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_fast_and_wrong_is_rejected_on_the_device(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TMPDIR", os.getcwd())
    x = jax.ShapeDtypeStruct((512, 4096), "float32")
    result = own_functions.running_sum.tune(x, engine="device", trials=4)
    assert result.best.config["way"] == "right"
    assert all(record.config["way"] == "wrong" for record in result.rejected)


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, env=here, timeout=500
    )


SCRIPT = """
    import autotune, jax
    from jax.experimental import pallas as pl

    @autotune.tunable({"block": [8, 64, 512]}, reference=lambda x: 2 * x, platforms=("tpu",),
                      validate_on=lambda config, x: [[jax.ShapeDtypeStruct((2 * config["block"], 128), x.dtype)]])
    def double(x, *, block=8):
        spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
        call = pl.pallas_call(lambda x, o: o.__setitem__(..., x[...] * 2), out_shape=x, grid=(x.shape[0] // block,),
                              in_specs=[spec], out_specs=spec)
        return call(x)

    print(double.tune(jax.ShapeDtypeStruct((4096, 512), "float32"), target="v6e", trials=3).best.config)
"""


@needs_compiler
def test_a_script_tunes_what_it_defines(tmp_path):
    script = tmp_path / "ten_lines.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'block': 512}\n"  # once: workers load the script for what it defines
    assert (tmp_path / "results/presets/tpu_v6_lite/double.json").is_file()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def make():\n    return autotune.tunable({'a': [1]})(lambda x, a=1: x)\nf = make()", "not inside a function"),
        ("@autotune.tunable({'a': [1]}, name='matmul')\ndef f(x, a=1): return x", "there is a kernel matmul already"),
    ],
)
def test_what_other_processes_cannot_find_is_said(text, words, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import autotune, jax\n{text}\nf.tune(jax.ShapeDtypeStruct((8, 8), 'float32'), target='v5e')\n")
    done = run(script)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def test_at_a_prompt_it_is_said():
    text = "import autotune, jax\n@autotune.tunable({'a': [1]})\ndef f(x, a=1): return x\n"
    text += "f.tune(jax.ShapeDtypeStruct((8, 8), 'float32'), target='v5e')"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "put it into a file" in done.stderr.splitlines()[-1]


PYPROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"
    [project]
    name = "my-kernels"
    version = "1.0"
    [project.entry-points."autotune.kernels"]
    own_scale = "my_kernels:scale"
    own_benchmark = "my_kernels:benchmark"
    [tool.hatch.build.targets.wheel]
    packages = ["my_kernels.py"]
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_package_of_ones_own_is_tuned_by_name(tmp_path):
    """Installed with pip into an environment of its own, which sees this one's packages."""
    package, environment = tmp_path / "package", tmp_path / "venv"
    package.mkdir()
    (package / "pyproject.toml").write_text(textwrap.dedent(PYPROJECT))
    (package / "my_kernels.py").write_text((ROOT / "tests/own_functions.py").read_text())
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", str(package)], check=True, timeout=300)
    # A third party's package is found beside this project, wherever that is installed.
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if "site-packages" in entry)])
    here = {**os.environ, "PYTHONPATH": path}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [str(python), "-m", "autotune", *arguments]
        return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=here, timeout=300)

    listed = command("list", "own_scale")
    assert "x times a factor, in blocks of rows." in listed.stdout, listed.stderr
    tuned = command("own_scale", "--target", "v5e", "--problem", "arguments=float32:2048x256", "--trials", "4")
    assert tuned.returncode == 0, tuned.stderr
    assert "validated" in tuned.stdout
    assert (tmp_path / "results/presets/tpu_v5_lite/own_scale.json").is_file()
    measured = command(
        "own_benchmark", "--problem", "arguments=float32:512x512", "--target", "v5e", "--trials", "2", "--json"
    )
    assert '"time_ms"' in measured.stdout, measured.stderr

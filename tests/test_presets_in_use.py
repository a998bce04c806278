"""Presets where training code uses them: retracing, explanations, policies, tuning on a miss, pods, broken files."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from autotune import presets
from autotune.chips import get_chip
from autotune.errors import ResultsError, UsageError
from autotune.presets import miss
from tests.conftest import ROOT
from tests.test_presets import CONFIG, KERNEL, V5E, keep, preset, project  # noqa: F401

ASK = {"m": 2048, "n": 2048}
pytestmark = pytest.mark.usefixtures("project")


@pytest.fixture
def project_only(monkeypatch):
    monkeypatch.delenv("AUTOTUNE_PRESETS", raising=False)


def test_a_jitted_function_is_traced_anew_when_what_is_used_changes(tmp_path):
    import jax

    import kernels.matmul.api  # noqa: F401  what training code imports before it traces

    traced = []

    @jax.jit
    def step(x):
        traced.append(presets.lookup(KERNEL, ASK, device_kind=V5E)["mode"])
        return x + 1

    keep(preset())
    mine = keep(preset(config={**CONFIG, "mode": "a"}), tmp_path / "mine")
    step(1.0)
    with presets.using(mine):
        step(1.0)
        with presets.using({"toy": {**CONFIG, "mode": "c"}}):
            step(1.0)
        step(1.0)
    step(1.0)
    with presets.using(mine):
        step(1.0)
    assert traced == ["b", "a", "c"]  # each once: going back costs no trace
    keep(preset(0.5, config={**CONFIG, "mode": "c"}), tmp_path / "mine")
    with presets.using(mine):
        step(1.0)
    assert traced == ["b", "a", "c", "c"]  # the file has changed meanwhile


def test_explain_says_what_is_taken_and_why_nothing_else_is(tmp_path):
    keep(preset())
    keep(preset(problem=KERNEL.problems["large"]))
    keep(preset(problem=KERNEL.problems["small"].replace({"dtype": "float32"})))
    said = presets.explain(KERNEL, ASK, device_kind=V5E)
    assert said.match.how == "exact"
    assert {verdict.reason for verdict in said.others} == {
        "there is one for this very problem",
        "its dtype or an option is another",
    }
    near = presets.explain(KERNEL, {"m": 4096, "n": 2048}, device_kind="v5e")
    text = str(near)
    assert "nearest problem" in text
    assert "tune it python -m autotune toy --target v5e --problem m=4096,n=2048" in text
    assert str(Path("results/presets").resolve()) in text
    with presets.using({"toy": CONFIG}):
        assert "given for every problem" in str(presets.explain(KERNEL, ASK, device_kind=V5E))
    none = presets.explain(KERNEL, ASK, device_kind="TPU v6 lite")
    assert none.match.how == "heuristic"
    assert none.others == ()


def test_a_warning_points_at_the_line_that_asked():
    with pytest.warns(presets.PresetWarning) as caught:
        presets.lookup(KERNEL, {"m": 512, "n": 512}, device_kind=V5E)
    assert caught[0].filename == __file__


def test_a_stale_preset_is_used_warned_of_or_refused():
    ours = {"kernel": KERNEL.version}
    keep(preset(versions={**ours, "libtpu": "0.0.1"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert presets.lookup(KERNEL, ASK, device_kind=V5E) == CONFIG
    with presets.policy(compiler="warn"), pytest.warns(presets.PresetWarning, match=r"tuned with libtpu 0\.0\.1"):
        presets.lookup(KERNEL, ASK, device_kind=V5E)
    with presets.policy(compiler="refuse"):
        assert presets.find(KERNEL, KERNEL.problems["small"], get_chip(V5E)).how == "heuristic"
        assert "which the policy refuses" in str(presets.explain(KERNEL, ASK, device_kind=V5E))
        with pytest.warns(presets.PresetWarning, match="no preset"):
            presets.lookup(KERNEL, ASK, device_kind=V5E)
    assert presets.find(KERNEL, KERNEL.problems["small"], get_chip(V5E)).how == "exact"


@pytest.mark.parametrize(
    ("text", "how"),
    [("kernel=refuse", "heuristic"), ("kernel=use", "exact"), ("kernel=warn,compiler=refuse", "exact")],
)
def test_the_environment_says_the_policy(text, how, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_STALE", text)
    keep(preset(versions={"kernel": "older"}))
    assert presets.find(KERNEL, KERNEL.problems["small"], get_chip(V5E)).how == how


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AUTOTUNE_STALE", "refuse"),
        ("AUTOTUNE_STALE", "kernel=never"),
        ("AUTOTUNE_STALE", "jax=use"),
        ("AUTOTUNE_ON_MISS", "later"),
        ("AUTOTUNE_ON_MISS", "tune:soon"),
        ("AUTOTUNE_ON_MISS", "tune:0"),
        ("AUTOTUNE_ON_MISS", "tune:nan"),
    ],
)
@pytest.mark.parametrize("ask", [ASK, {"m": 256, "n": 256}])
def test_a_wrong_setting_is_said_by_name_whatever_is_looked_up(name, text, ask, monkeypatch):
    keep(preset())
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=re.escape(f"${name}={text}: must be as in ")):
        presets.lookup(KERNEL, ask, device_kind=V5E)


def test_places_of_the_environment_that_are_none_are_said(tmp_path, monkeypatch):
    """Presets that training asked for by name and did not get cost it time that nobody sees."""
    keep(preset())
    monkeypatch.setenv("AUTOTUNE_PRESETS", str(tmp_path / "mistyped"))
    with pytest.warns(presets.PresetWarning, match=r"\$AUTOTUNE_PRESETS: .*mistyped does not exist"):
        assert presets.lookup(KERNEL, ASK, device_kind=V5E) == CONFIG
    script = tmp_path / "config.py"
    script.write_text("")
    monkeypatch.setenv("AUTOTUNE_PRESETS", str(script))
    with pytest.raises(ResultsError, match=r"config\.py is no presets folder, and no file of presets \(\.json\)"):
        presets.lookup(KERNEL, ASK, device_kind=V5E)


def test_a_place_of_the_environment_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_PRESETS", "~/mine")
    keep(preset(config={**CONFIG, "mode": "a"}), tmp_path / "mine")
    assert presets.lookup(KERNEL, ASK, device_kind=V5E)["mode"] == "a"


def test_a_file_that_is_there_and_cannot_be_opened_is_not_taken_for_none():
    path = keep(preset())
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(ResultsError, match=r"toy\.json cannot be read as presets \(.*links.*\)"):
        presets.lookup(KERNEL, ASK, device_kind=V5E)


def test_a_file_where_a_folder_of_presets_should_be_is_said():
    folder = Path("results/presets")
    folder.mkdir(parents=True)
    (folder / "tpu_v5_lite").write_text("")
    with pytest.raises(ResultsError, match=r"toy\.json cannot be read as presets \(Not a directory\)"):
        presets.lookup(KERNEL, ASK, device_kind=V5E)


@pytest.mark.parametrize("given", [None, 5, {"toy": None}, {"toy": "abc"}, {5: CONFIG}, ["toy"]])
def test_using_what_is_no_config_is_said_with_what_would_be(given):
    with pytest.raises(UsageError, match="kernel name to config"), presets.using(given):
        pass


def test_using_a_mistyped_kernel_is_said():
    said = "no kernel 'atention'; did you mean 'attention'"
    with pytest.warns(presets.PresetWarning, match=said), presets.using({"atention": {}}):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with presets.using({"my_own_function": {"rows": 8}}):
            pass


@pytest.mark.parametrize("kind", [None, 7, "", "TPU"])
def test_a_device_kind_that_is_none_is_said(kind):
    with pytest.raises(UsageError, match="unknown target"):
        presets.lookup(KERNEL, ASK, device_kind=kind)


@pytest.fixture
def runs(monkeypatch):
    """The tuner's command lines, with what becomes of them."""
    commands: list[list[str]] = []
    state = {"code": 0, "keep": True}

    def run(command, **options):
        commands.append(command)
        if state["keep"]:
            keep(preset(problem=KERNEL.problem_type.from_dict({"m": 1024, "n": 1024}), config={**CONFIG, "mode": "a"}))
        options["stdout"].write("starting\nit went wrong\n")
        return subprocess.CompletedProcess(command, state["code"])

    monkeypatch.setattr(miss.subprocess, "run", run)
    monkeypatch.setattr(miss, "_tried", set())
    return commands, state


def test_a_miss_is_tuned_once_when_asked_for(runs):
    commands, _ = runs
    with presets.on_miss("tune", budget=30), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert presets.lookup(KERNEL, {"m": 1024, "n": 1024}, device_kind=V5E)["mode"] == "a"
    (command,) = commands
    assert command[1:6] == ["-m", "autotune", "toy", "--problem", "m=1024,n=1024,dtype=bfloat16"]
    assert command[command.index("--budget") + 1] == "30.0"
    assert command[command.index("--engine") + 1] == "compiler"  # the TPU is busy with the training


def test_a_failed_tuning_costs_a_warning_and_is_not_tried_again(runs):
    commands, state = runs
    state.update(code=1, keep=False)
    with presets.on_miss("tune"):
        with pytest.warns(presets.PresetWarning) as caught:
            presets.lookup(KERNEL, {"m": 640, "n": 640}, device_kind=V5E)
        presets.lookup(KERNEL, {"m": 640, "n": 640}, device_kind=V5E)
    assert len(commands) == 1
    assert "could not be tuned (it went wrong): going on without" in str(caught[0].message)
    assert "took an untuned config" in str(caught[1].message)


@pytest.mark.slow
def test_a_miss_is_tuned_for_real(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ask = {"m": 512, "n": 512, "k": 512, "dtype": "bfloat16"}
    monkeypatch.setenv("AUTOTUNE_ON_MISS", "tune:20")
    with warnings.catch_warnings():
        warnings.simplefilter("error", presets.PresetWarning)
        config = presets.lookup("matmul", ask, device_kind="TPU v5")
    (kept,) = presets.read(Path("results/presets/tpu_v5/matmul.json"))
    assert kept.validated
    assert config == dict(kept.config)


HOSTS = """
    import sys, jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    from autotune import presets
    presets.check_hosts("TPU v5 lite")
    print("the same")
"""


@pytest.mark.parametrize("other", [False, True])
def test_hosts_with_other_presets_are_told_apart(other, tmp_path):
    with socket.create_server(("", 0)) as listener:
        address = f"localhost:{listener.getsockname()[1]}"
    processes = []
    for number in (0, 1):
        entry = preset(config={**CONFIG, "mode": "a" if other and number else "b"})
        folder = tmp_path / str(number)
        entry = entry.__class__(**{**entry.to_dict(), "kernel": "matmul"})
        presets.save(presets.preset_path(folder, V5E, "matmul"), entry)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "AUTOTUNE_PRESETS": str(folder), "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(HOSTS), address, str(number)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ends = [process.communicate(timeout=100) for process in processes]
    for process, (out, err) in zip(processes, ends, strict=True):
        if other:
            assert "process 1 has other presets" in err
            assert process.returncode != 0
        else:
            assert out.endswith("the same\n"), err


WRITER = """
    import sys, time
    from pathlib import Path
    from tests.fakes import ToyProblem
    from tests.test_presets import preset
    from autotune import presets
    end, n = time.monotonic() + float(sys.argv[3]), 0
    while time.monotonic() < end:
        n += 1
        presets.save(Path(sys.argv[1]), preset(problem=ToyProblem(m=int(sys.argv[2]), n=n)))
    print(n)
"""


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_two_processes_that_write_at_once_lose_nothing(seconds, tmp_path):
    path = tmp_path / "tpu_v5_lite" / "toy.json"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    writers = [
        subprocess.Popen([*command, str(m), str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for m in (1, 2)
    ]
    counts = [int(writer.communicate(timeout=seconds + 60)[0]) for writer in writers]
    assert min(counts) > 5
    written = {(entry.problem["m"], entry.problem["n"]) for entry in presets.read(path)}
    assert written == {(m, n) for m, count in zip((1, 2), counts, strict=True) for n in range(1, count + 1)}


BROKEN = {
    "cut in the middle": lambda text: text[: len(text) // 2],
    "a wrong type": lambda text: text.replace('"time_ms": 1.0', '"time_ms": "fast"'),
    "empty": lambda text: "",
    "a prediction that calls itself a measurement": lambda text: text.replace(
        '"source": "predicted"', '"source": "measured", "method": "schedule"'
    ),
    "an unknown version": lambda text: text.replace('"kernel":', '"format": 99, "kernel":'),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_named_and_the_others_serve(how, capfd):
    from autotune.cli import main

    path = keep(preset())
    matmul = preset(config={**CONFIG, "mode": "a"})
    keep(matmul.__class__(**{**matmul.to_dict(), "kernel": "other"}))
    text = BROKEN[how](path.read_text())
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"toy\.json cannot be read as presets .*: repair it or move it away"):
        presets.lookup(KERNEL, ASK, device_kind=V5E)
    with pytest.raises(ResultsError):
        presets.save(path, preset(0.1))
    assert path.read_text() == text
    assert main(["presets", "show", "--results", "results"]) == 2
    out, err = capfd.readouterr()
    assert '"kernel": "other"' in out
    assert "toy.json cannot be read" in err
    assert main(["presets", "check", "--quick", "--results", "results", "--json"]) == 1
    assert any("toy.json" in one["reason"] for one in json.loads(capfd.readouterr().out)["problems"])

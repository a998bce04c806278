"""The command line, from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import engines
from autotune.cli import main
from autotune.errors import UnavailableError
from autotune.outcome import Outcome, Status
from autotune.tuner import REFUSALS_IN_A_ROW
from tests.fakes import ToyKernel, timed


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch, toy_registered) -> Path:
    """An empty project folder, in which the toy kernel is registered."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


BAD = [
    ("nokernel", "unknown kernel 'nokernel'", "toy"),
    ("toy --trials 0", "0", "a positive integer"),
    ("toy --trials many", "many", "a positive integer"),
    ("toy --jobs 0", "0", "a positive integer"),
    ("toy --jobs -1", "-1", "a positive integer"),
    ("toy --timeout 0", "0", "a positive number of seconds"),
    ("toy --budget nan", "nan", "a positive number of seconds"),
    ("toy --seed x", "x", "an integer of 0 or more"),
    ("toy --seed 4294967296", "4294967296", "below 4294967296"),
    ("toy --timeout 1e18", "1e18", "a week"),
    ("toy --budget inf", "inf", "a week"),
    ("toy --jobs 1000000", "1000000", "at most 1024"),
    ("toy --trials 99999999999999999999", "99999999999999999999", "a positive integer"),
    ("toy --storage /dev/full", "/dev/full", "no regular file"),
    ("toy --storage .", ".", "no regular file"),
    (f"toy --storage {'s' * 300}", "sss", "name too long"),
    ("toy --storage sqlite:///no/such/folder/x.db", "no/such/folder", "cannot be opened"),
    (f"toy --results {'r' * 300}", "rrr", "name too long"),
    ("toy --results /dev/null/results", "/dev/null", "give a folder"),
    (f"report --results {'r' * 300}", "rrr", "name too long"),
    (f"presets list --results {'r' * 300}", "rrr", ""),
    (f"toy --study {'s' * 101}", "sss", "100 letters"),
    ("toy --study s\u00e9", "--study", "letters, digits"),
    ("toy --study .hidden", ".hidden", "no leading dot"),
    ("toy --engine warp", "warp", "compiler"),
    ("toy --target v9", "unknown target 'v9'", "v5e"),
    ("toy --problem huge", "no problem named 'huge'", "small"),
    ("toy --problem q=1", "unknown problem field 'q'", "causal"),
    ("toy --problem m=0", "m=0", "a positive integer"),
    ("toy --problem m=1.5", "m=1.5", "an integer"),
    ("toy --problem small,m", "'m'", "name=value"),
    ("toy --problem m=100,n=100", "no valid config", ""),
    ("toy --problem dtype=int4", "dtype=int4", "bfloat16"),
    ("toy --storage http://x", "http://x", "sqlite:///"),
    ("toy --study a/b", "a/b", "letters, digits"),
    ("toy --colour", "--colour", "see autotune tune --help"),
    ("list --colour", "--colour", "see autotune list --help"),
    ("predict toy --jobs x", "x", "see autotune predict --help"),
    ("predict toy", "--config", ""),
    ("predict toy --config block_m=0,block_n=128", "block_m=0", "block_m must be positive"),
    ("predict toy --config block_m=128", "lacks block_n", ""),
    ("predict toy --config block_q=128,block_n=1", "unknown parameter 'block_q'", "block_m"),
    ("predict toy --config block_m=128,block_n=128,mode=z", "mode=z", "a, b or c"),
    ("predict toy --configs nowhere.csv", "nowhere.csv", ""),
    ("predict toy --config block_m=128,block_n=128 --columns bm=block_m", "--columns", "--configs"),
    ("list nokernel", "unknown kernel 'nokernel'", "toy"),
    ("list train_step --target v6e", "the problem is one for v5e", "leave --target out"),
    ("report nokernel", "unknown kernel 'nokernel'", "toy"),
    ("report toy", "no presets for toy", "python -m autotune toy"),
    ("presets eat", "eat", "list"),
    ("presets list --results nowhere", "nowhere", ""),
    ("presets list --quick", "--quick", "see autotune presets --help"),
    ("presets export --to csv toy", "csv", "tokamax"),
    ("presets export toy", "--to", "tokamax or t4"),
]


@pytest.mark.parametrize(("line", "wrong", "right"), BAD, ids=[line for line, *_ in BAD])
def test_bad_usage_is_one_line_and_leaves_nothing(line, wrong, right, fake_engine, project, capfd):
    opened = fake_engine()
    assert main(line.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert wrong in err
    assert right in err
    assert list(project.iterdir()) == []
    assert not opened


def test_bad_usage_in_a_process_of_its_own(command):
    done = command("toy", "--problem", "heads=3")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "unknown problem field 'heads': use m, n, dtype, causal or cap" in done.stderr
    assert list(command.folder.iterdir()) == []


def test_a_results_folder_that_is_a_file_is_refused(fake_engine, project, capfd):
    fake_engine()
    (project / "file").write_text("mine")
    assert main(["toy", "--results", "file/results"]) == 2
    assert "is a file" in capfd.readouterr().err
    assert (project / "file").read_text() == "mine"


def test_an_unreadable_results_file_is_named_and_untouched(fake_engine, project, capfd):
    opened = fake_engine()
    path = project / "results" / "presets" / "tpu_v5_lite" / "toy.json"
    path.parent.mkdir(parents=True)
    path.write_text("]")
    for line in ("toy --trials 3", "report toy", "presets list --results results"):
        assert main(line.split()) == 2
        err = capfd.readouterr().err
        assert len(err.splitlines()) == 1
        assert "toy.json" in err
    assert path.read_text() == "]"
    assert [file for file in project.rglob("*") if file.is_file()] == [path]
    assert not opened


def test_an_engine_that_cannot_be_had_is_one_line(monkeypatch, project, capfd):
    def open_engine(*_, **__):
        raise UnavailableError("no such device here: use --engine compiler")

    monkeypatch.setattr(engines, "open_engine", open_engine)
    assert main(["toy"]) == 1
    assert capfd.readouterr().err == "autotune: no such device here: use --engine compiler\n"
    assert list(project.iterdir()) == []


def test_tuning_shows_the_table_and_keeps_the_preset(fake_engine, project, capfd):
    (opened,) = (fake_engine(),)
    assert main(["toy", "--trials", "45", "--jobs", "3", "--timeout", "7"]) == 0
    out, err = capfd.readouterr()
    assert (opened[0].jobs, opened[0].timeout_s) == (3, 7.0)
    for words in ("default config", "tuned", "roofline", "4.02×", "block_m=1024,block_n=512,mode=b", "1.0e-03"):
        assert words in out
    assert "predicted for v5e (compiler schedule), not measured" in out
    assert "results/presets/tpu_v5_lite/toy.json" in out
    assert "45/45 trials" in err
    table = [line for line in out.splitlines() if "default config" in line or "──" in line]
    assert all(len(line) <= 80 for line in table)


def test_json_is_one_document_on_standard_output(fake_engine, capfd):
    def chatty(config):
        os.write(1, b"a library prints\n")
        print("and so does python")
        return timed(config)

    fake_engine(outcome=chatty)
    assert main(["toy", "--trials", "12", "--json", "--seed", "3"]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["trials"] == {"ok": 12}
    assert document["stopped_because"] == "trials"
    assert document["best"]["validated"] is True
    assert Path(document["preset"]).is_file()
    assert "a library prints" in err
    assert "and so does python" in err


def test_nothing_valid_is_exit_code_1(fake_engine, project, capfd):
    fake_engine(outcome=lambda config: Outcome(Status.LOWERING_ERROR, message="cannot"))
    assert main(["toy", "--trials", "4", "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert document["best"] is document["preset"] is None
    assert document["trials"] == {"lowering_error": 4}
    assert document["baselines"]["default"] == {"time_ms": None, "status": "lowering_error"}
    assert not (project / "results" / "presets").exists()


def test_the_same_command_goes_on_where_it_was(fake_engine, capfd):
    opened = fake_engine()
    main(["toy", "--trials", "10", "--json"])
    main(["toy", "--trials", "16", "--json"])
    assert [len(engine.evaluated) for engine in opened] == [10, 6]
    assert "10 trials of it known" in capfd.readouterr().err


def test_predict_gives_one_object_a_config_in_order(fake_engine, project, capfd):
    opened = fake_engine()
    (project / "configs.csv").write_text(
        "bm,bn,mode,m,note\n512,512,b,,first\n0,512,a,,bad\n1024,512,,,\n128,128,c,8192,larger\n512,512,b,,again\n"
    )
    assert main(["predict", "toy", "--target", "v5e", "--configs", "configs.csv", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [entry["status"] for entry in document] == ["ok", "invalid", "ok", "ok", "ok"]
    assert document[0] == {
        "config": {"block_m": 512, "block_n": 512, "mode": "b"},
        "status": "ok",
        "time_ms": pytest.approx(2.0),
        "compute_ms": None,
        "memory_ms": None,
        "bound": "compute",
        "source": "schedule",
    }
    assert document[1]["message"] == "block_m must be positive"
    assert document[2]["config"]["mode"] == "a"
    assert [entry.get("problem") for entry in document] == [None, None, None, {"m": 8192}, None]
    assert [engine.task.problem.m for engine in opened] == [2048, 8192]
    assert len(opened[0].evaluated) == 2  # The repeated row is not evaluated again.
    assert main(["predict", "toy", "--target", "v5e", "--configs", "configs.csv"]) == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if "block_m=" in line]
    assert ["m=8192" in row for row in rows] == [False, False, False, True, False]


def test_predict_takes_a_column_map(fake_engine, project, capfd):
    fake_engine()
    (project / "configs.csv").write_text("rows,cols\n512,256\n")
    assert main(["predict", "toy", "--configs", "configs.csv", "--columns", "rows=block_m,cols=block_n", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["config"] == {"block_m": 512, "block_n": 256, "mode": "a"}


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ("row=block_m", "--columns names 'row'"),
        ("rows=block_q", "--columns gives rows the unknown parameter 'block_q'"),
        ("rows=block_m,cols=block_m", "--columns gives several columns the parameter 'block_m'"),
        ("rows", "in --columns"),
    ],
)
def test_a_bad_column_map_is_not_blamed_on_a_line(fake_engine, project, capfd, columns, wrong):
    opened = fake_engine()
    (project / "configs.csv").write_text("rows,cols\n512,256\n")
    assert main(["predict", "toy", "--configs", "configs.csv", "--columns", columns]) == 2
    err = capfd.readouterr().err
    assert wrong in err
    assert "line 2" not in err
    assert not opened


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no rows"),
        ("bm,bn\n", "no rows"),
        ("bm,bn\n1\n", "line 2: it must have 2 columns"),
        ("bm,bn\n128,128\nx,128\n", "line 3: block_m=x: must be an integer"),
        ("bm,other\n128,128\n", "line 2: the config lacks block_n"),
        ("bm,bn,m\n128,128,0\n", "line 2: m=0: must be a positive integer"),
        ("bm,bn,bm\n128,128,256\n", "configs.csv has the column 'bm' twice"),
        ("bm, bn ,bn\n128,128,256\n", "configs.csv has the column 'bn' twice"),
    ],
)
def test_a_bad_file_of_configs_is_said_with_its_line(fake_engine, project, capfd, text, wrong):
    fake_engine()
    (project / "configs.csv").write_text(text)
    assert main(["predict", "toy", "--configs", "configs.csv"]) == 2
    err = capfd.readouterr().err
    assert wrong in err
    assert len(err.splitlines()) == 1


def test_predict_of_one_config_as_a_table(fake_engine, capfd):
    fake_engine()
    assert main(["predict", "toy", "--config", "block_m=512,block_n=512,mode=b"]) == 0
    out = capfd.readouterr().out
    assert "2.000 ms" in out
    assert "not measured" in out


def test_list_gives_kernels_parameters_and_problems(capfd):
    assert main(["list", "--json"]) == 0
    toy = next(kernel for kernel in json.loads(capfd.readouterr().out) if kernel["name"] == "toy")
    assert [parameter["name"] for parameter in toy["parameters"]] == ["block_m", "block_n", "mode"]
    assert list(toy["problems"]) == ["small", "large"]
    assert main(["list", "toy"]) == 0
    out = capfd.readouterr().out
    assert "block_m * block_n must be at most 2**20" in out
    assert "66 valid configs of 75" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_list_loads_no_jax(toy_package):
    script = (
        "import sys; from autotune.cli import main; main(['list', '--json']); "
        "print({'jax', 'optuna', 'pandas', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "set()"
    json.loads(done.stdout)


def test_presets_list_show_and_check(fake_engine, project, capfd, monkeypatch):
    fake_engine()
    main(["toy", "--trials", "12"])
    capfd.readouterr()
    assert main(["presets", "check", "toy", "--results", "results"]) == 0
    assert "1 presets read, 1 compiled; something is wrong with 0" in capfd.readouterr().out
    assert main(["presets", "list", "--results", "results", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["kernel"] == "toy"
    assert main(["presets", "show", "toy", "--results", "results"]) == 0
    assert '"max_rel_error": 0.001' in capfd.readouterr().out
    assert main(["presets", "export", "--to", "t4", "toy", "--results", "results", "--out", "t4"]) == 0
    assert Path(capfd.readouterr().out.strip()).parts[0] == "t4"
    path = project / "results" / "presets" / "tpu_v5_lite" / "toy.json"
    path.write_text(path.read_text().replace('"block_m": ', '"block_m": 7'))
    assert main(["presets", "check", "--results", "results"]) == 1
    assert "must divide m" in capfd.readouterr().out


def test_counting_says_how_far_it_is_where_there_is_no_terminal(monkeypatch, capfd):
    from autotune.cli import progress

    with progress.counting("rows", 3) as advance:
        advance()
    assert capfd.readouterr().err == ""  # Nothing of what is quick.
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.counting("rows", 3) as advance:
        for _ in range(3):
            advance()
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["1/3 rows", "2/3 rows"]  # The end is the result's to say.


def test_doctor_says_what_is_here_and_what_is_missing(capfd, monkeypatch):
    code = main(["doctor", "--json"])
    document = json.loads(capfd.readouterr().out)
    findings = {finding["name"]: finding for finding in document["findings"]}
    assert {"python", "cores", "memory", "jax", "kernels", "kernel toy", "TPU compiler"} <= set(findings)
    assert code == (0 if document["ok"] else 1)
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert main(["doctor"]) == 1
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "TPU compiler" in line]
    assert line.startswith("MISSING")
    assert "x86-64" in line


def test_doctor_knows_another_projects_kernels_package(tmp_path, command):
    other = tmp_path / "other" / "kernels"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    script = f"import sys; sys.path.insert(0, {str(other.parent)!r}); from autotune.cli import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    (line,) = [line for line in done.stdout.splitlines() if " kernels " in line]
    assert "another project's: pip uninstall kernels" in line


def test_ctrl_c_in_a_terminal_finishes_with_what_is_known(toy_package, project):
    script = (
        "import sys, time\n"
        "from autotune import engines\n"
        "from autotune.cli import main\n"
        "from tests.fakes import FakeEngine, timed\n"
        "def slow(config):\n"
        "    time.sleep(0.05)\n"
        "    return timed(config)\n"
        "engines.open_engine = lambda name, task, *, jobs, timeout_s, pod: FakeEngine(task, jobs=jobs, outcome=slow)\n"
        "sys.exit(main(['toy', '--trials', '66', '--json', '--jobs', '1']))\n"
    )
    path = os.pathsep.join([str(toy_package), str(Path(__file__).resolve().parent.parent)])
    running = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=project,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in running.stderr:
        if line.startswith("1/66"):
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    document = json.loads(out)
    assert document["stopped_because"] == "interrupted"
    assert document["best"]["validated"] is True
    assert "Traceback" not in err


def test_why_nothing_works_is_said(fake_engine, capfd):
    fake_engine(outcome=lambda config: Outcome(Status.CRASH, message="ended by SIGKILL\nsecond line"))
    assert main(["toy", "--trials", "4"]) == 1
    out = capfd.readouterr().out
    assert "crash: ended by SIGKILL\n" in out
    assert "second line" not in out


def test_a_kernel_that_is_wrong_everywhere_is_said_to_be(fake_engine, capfd):
    fake_engine(right=lambda config: False)
    assert main(["toy", "--trials", "20"]) == 1
    out = capfd.readouterr().out
    assert f"{REFUSALS_IN_A_ROW} configs, one after the other, were not shown right" in out
    assert "wrong_result: off by half on m=256" in out


def test_a_study_of_something_else_is_refused_before_the_engine(fake_engine, capfd):
    opened = fake_engine()
    main(["toy", "--trials", "3", "--study", "mine"])
    capfd.readouterr()
    for more in (["--seed", "1"], ["--problem", "large"]):
        assert main(["toy", "--study", "mine", *more]) == 2
        err = capfd.readouterr().err
        assert len(err.splitlines()) == 1
        assert "study mine was made for" in err
    assert len(opened) == 1


def test_an_unreadable_study_is_refused_before_the_engine(fake_engine, project, capfd):
    opened = fake_engine()
    main(["toy", "--trials", "3"])
    (journal,) = project.glob("results/studies/*.journal")
    journal.write_text("[]\n")
    capfd.readouterr()
    for line in ("toy --trials 3", f"toy --storage {journal}", "report toy"):
        assert main(line.split()) == 2
        out, err = capfd.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert journal.name in err
    assert journal.read_text() == "[]\n"
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad value\nfor X"), "ValueError: bad value"),
        (OSError(28, "No space left on device", "f"), "f: No space left on device"),
    ],
)
def test_a_kernel_whose_modules_do_not_load_is_one_line(fake_engine, monkeypatch, project, capfd, error, words):
    def version(self):
        raise error

    monkeypatch.setattr(ToyKernel, "version", property(version))
    opened = fake_engine()
    assert main(["toy", "--trials", "3"]) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert words in err
    assert list(project.iterdir()) == []
    assert not opened


def test_json_stays_pure_where_a_kernels_module_prints(tmp_path, command):
    (tmp_path / "noisy.py").write_text(
        "import os\nprint('python prints')\nos.write(1, b'C prints\\n')\nfrom tests.fakes import ToyKernel\n"
        "class Noisy(ToyKernel):\n    name = 'noisy'\n"
    )
    info = tmp_path / "noisy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[autotune.kernels]\nnoisy = noisy:Noisy\n")
    for line in ("list noisy --json", "list --json", "doctor --json"):
        done = command(*line.split(), path=tmp_path)
        json.loads(done.stdout)
        assert "python prints" in done.stderr
        assert "C prints" in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("autotune list >&-", 0, ""),
        ("autotune list --json >&-", 0, ""),
        ("autotune list >&- 2>&-", 0, ""),
        ("autotune list <&- >/dev/null", 0, ""),
        ("autotune doctor --nope 2>&-", 2, ""),
        ("autotune list | true", 0, ""),
        ("autotune list --json | true", 0, ""),
        ("autotune presets list | true", 0, ""),
        ("autotune --help | true", 0, ""),
        ("autotune list > /dev/full", 1, "autotune: No space left on device\n"),
        ("autotune list --json > /dev/full", 1, "autotune: No space left on device\n"),
        ("export PYTHONIOENCODING=ascii; autotune presets list >/dev/null", 0, ""),
        (
            "export PYTHONIOENCODING=ascii; autotune toy --problem m=\u00b5 >/dev/null",
            2,
            "autotune: m=\\xb5: must be an integer\n",
        ),
    ],
)
def test_streams_as_a_shell_may_leave_them(command, line, code, error):
    done = command.shell(line)
    assert (done.returncode, done.stderr) == (code, error)


@pytest.mark.parametrize("module", ["argparse", "rich"])
def test_ctrl_c_at_start_up_is_one_line(tmp_path, command, module):
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    done = command("presets", "list", path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autotune: interrupted\n")


def test_predict_takes_short_names_of_parameters(fake_engine, project, capfd):
    fake_engine()
    assert main(["predict", "toy", "--config", "bm=512,bn=512", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["config"]["block_m"] == 512
    assert main(["predict", "toy", "--config", "bm=512,block_m=512,bn=512"]) == 2
    assert "block_m and bm" in capfd.readouterr().err


def test_presets_list_names_problems_and_fits_a_terminal(fake_engine, project, capfd):
    fake_engine()
    main(["toy", "--trials", "4"])
    capfd.readouterr()
    assert main(["presets", "list", "--results", "results"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "TPU v5 lite, predicted"
    assert any(line.split()[:2] == ["toy", "small"] for line in lines)
    assert all(len(line) <= 80 for line in lines)

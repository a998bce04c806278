"""The search and the tuner, with an engine that costs nothing."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from autotune import presets
from autotune.chips import get_chip
from autotune.engines import Task
from autotune.errors import AutotuneError, ResultsError, UsageError
from autotune.outcome import Config, Outcome, Source, Status
from autotune.search import SearchSettings, StopReason
from autotune.search.study import load_records
from autotune.space import Param, Space, config_key
from autotune.tuner import REFUSALS_IN_A_ROW, Observer, TuneResult, check, tune
from autotune.validation import Validation
from tests.fakes import FakeEngine, ToyKernel, timed, toy_task, toy_time

SPACE = ToyKernel().space(ToyKernel.problems["small"], get_chip("v5e"))
BEST = {"block_m": 1024, "block_n": 512, "mode": "b"}


def search(results: Path, engine: FakeEngine | None = None, observer: Observer | None = None, **settings) -> TuneResult:
    """One whole run."""
    with engine or FakeEngine() as running:
        return tune(running.task, running, SearchSettings(results=results, **settings), observer)


def test_finds_the_best_of_a_space_that_its_ranking_gets_wrong(tmp_path):
    result = search(tmp_path, trials=45)
    assert result.best.config == BEST
    assert result.best.outcome.time_ms == pytest.approx(toy_time(BEST))
    assert result.speedup("default") == pytest.approx(
        toy_time({"block_m": 128, "block_n": 128, "mode": "a"}) / toy_time(BEST)
    )
    assert result.speedup("xla") == pytest.approx(3.0 / toy_time(BEST))
    assert result.stopped_because is StopReason.TRIALS


def test_in_a_vast_space_the_ranking_leaves_alone_what_the_estimate_knows_nothing_of(tmp_path):
    knobs = {f"knob_{number}": 2 for number in range(9)}
    known, unknown = list(knobs)[:5], dict(list(knobs.items())[5:])

    class Vast(ToyKernel):
        def space(self, problem, chip):
            toy = super().space(problem, chip)
            more = [Param(name, (0, 1, 2, 3), "something that the compiler does", default=2) for name in knobs]
            return Space([*toy.params.values(), *more], toy.constraints)

        def baselines(self, problem, chip):
            return {name: {**config, **knobs} for name, config in super().baselines(problem, chip).items()}

        def heuristic(self, problem, chip):
            return self.baselines(problem, chip)["default"]

        def estimate_ms(self, problem, config, chip):
            return super().estimate_ms(problem, config, chip) + 0.1 * sum(abs(config[name] - 1) for name in known)

    kernel = Vast()
    engine = FakeEngine(Task(kernel, kernel.parse_problem("small"), get_chip("v5e")), jobs=1)
    search(tmp_path, engine, trials=20)
    ranked = engine.evaluated[1:11]
    assert all(unknown.items() <= config.items() for config in ranked)
    assert ranked[0] == {"block_m": 512, "block_n": 512, "mode": "a", **dict.fromkeys(known, 1), **unknown}
    assert any(not unknown.items() <= config.items() for config in engine.evaluated[11:])


def test_evaluates_valid_configs_only_and_each_once(tmp_path):
    engine = FakeEngine()
    result = search(tmp_path, engine, trials=50)
    assert len(engine.evaluated) == len(engine.distinct) == 50
    assert all(SPACE.why_invalid(config) is None for config in engine.evaluated)
    assert sum(result.counts.values()) == 50


def test_starts_with_the_baseline_and_the_analytic_ranking(tmp_path):
    engine = FakeEngine(jobs=1)
    search(tmp_path, engine, trials=20)
    assert engine.evaluated[0] == {"block_m": 128, "block_n": 128, "mode": "a"}
    assert (engine.evaluated[1]["block_m"], engine.evaluated[1]["block_n"]) == (512, 512)


def test_stops_when_every_config_was_tried(tmp_path):
    engine = FakeEngine()
    result = search(tmp_path, engine, trials=1000)
    assert result.stopped_because is StopReason.EXHAUSTED
    assert engine.distinct == {config_key(config) for config in SPACE}
    assert len(engine.evaluated) == SPACE.size


def test_keeps_several_trials_in_flight(tmp_path):
    both = threading.Barrier(2, timeout=20)

    def outcome(config):
        both.wait()
        return timed(config)

    assert search(tmp_path, FakeEngine(jobs=2, outcome=outcome), trials=20).counts == {"ok": 20}


def test_the_same_request_resumes_and_repeats_nothing(tmp_path):
    first, second = FakeEngine(), FakeEngine()
    search(tmp_path, first, trials=15)
    result = search(tmp_path, second, trials=40)
    assert len(second.evaluated) == 25
    assert not first.distinct & second.distinct
    assert sum(result.counts.values()) == 40


def test_a_finished_study_gives_its_result_again_without_a_trial(tmp_path):
    first = search(tmp_path, trials=15)
    engine = FakeEngine(reference_ms=99.0)
    again = search(tmp_path, engine, trials=15)
    assert engine.evaluated == engine.validated == []
    assert again.best == first.best
    assert again.baselines == first.baselines


def test_another_seed_problem_or_target_is_another_study(tmp_path):
    requests = [("small", "v5e", 0), ("small", "v5e", 1), ("large", "v5e", 0), ("small", "v6e", 0)]
    names = {
        search(tmp_path, FakeEngine(toy_task(problem, target)), trials=3, seed=seed).study
        for problem, target, seed in requests
    }
    assert len(names) == 4


def test_a_named_study_is_resumed_by_its_name_and_refuses_another_problem(tmp_path):
    search(tmp_path, trials=5, study="mine")
    engine = FakeEngine()
    search(tmp_path, engine, trials=8, study="mine")
    assert len(engine.evaluated) == 3
    with pytest.raises(UsageError, match="study mine was made for problem m=2048"):
        search(tmp_path, FakeEngine(toy_task("large")), trials=8, study="mine")


@pytest.mark.parametrize("storage", ["sqlite:///{}/study.db", "journal:{}/study.log", "{}/study.log"])
def test_other_storages_resume_as_well(tmp_path, storage):
    search(tmp_path, trials=5, storage=storage.format(tmp_path))
    engine = FakeEngine()
    search(tmp_path, engine, trials=8, storage=storage.format(tmp_path))
    assert len(engine.evaluated) == 3


def test_a_killed_run_loses_only_what_was_in_flight(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from tests.fakes import FakeEngine, timed, toy_task
        from autotune.search import SearchSettings
        from autotune.tuner import tune

        count = 0
        def outcome(config):
            global count
            count += 1
            if count == 8:
                print(sorted(config.items()), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return timed(config)

        with FakeEngine(jobs=1, outcome=outcome) as engine:
            tune(engine.task, engine, SearchSettings(trials=20, results=Path(sys.argv[1])))
    """)
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    engine = FakeEngine()
    result = search(tmp_path, engine, trials=20)
    assert 20 - 7 <= len(engine.evaluated) <= 20 - 5  # 7 had ended; the last ones may not have been told yet.
    assert killed.stdout.strip() in [repr(sorted(config.items())) for config in engine.evaluated]
    assert result.counts == {"ok": 20}


def test_a_half_written_record_is_dropped(tmp_path):
    study = search(tmp_path, trials=5).study
    journal = tmp_path / "studies" / f"{study}.journal"
    with journal.open("a") as file:
        file.write('{"op_code": 4, "worker')
    assert sum(search(tmp_path, trials=8).counts.values()) == 8


def test_a_file_that_is_no_journal_is_named_and_untouched(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("my notes\nno newline at the end")
    with pytest.raises(ResultsError, match=r"notes\.txt"):
        search(tmp_path, trials=5, storage=str(file))
    assert file.read_text() == "my notes\nno newline at the end"


def test_infeasible_outcomes_cost_their_trial_and_nothing_else(tmp_path):
    def outcome(config):
        if config["block_m"] >= 1024:
            return Outcome(Status.VMEM_OOM, message="too much")
        if config["mode"] == "c":
            return Outcome(Status.CRASH, message="died")
        return timed(config)

    result = search(tmp_path, FakeEngine(outcome=outcome), trials=SPACE.size)
    assert sum(result.counts.values()) == SPACE.size
    assert result.counts["vmem_oom"] == sum(config["block_m"] >= 1024 for config in SPACE)
    assert result.counts["crash"] == sum(config["block_m"] < 1024 and config["mode"] == "c" for config in SPACE)
    assert result.best.config == {"block_m": 512, "block_n": 512, "mode": "b"}


def test_infeasible_outcomes_teach_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fakes.SIZES", tuple(2**power for power in range(3, 20)))
    engine = FakeEngine(
        toy_task("m=524288,n=524288"),
        outcome=lambda config: timed(config) if config["mode"] == "a" else Outcome(Status.TIMEOUT),
    )
    search(tmp_path, engine, trials=60)
    late = [config["mode"] for config in engine.evaluated[30:]]
    assert late.count("a") / len(late) > 0.6  # Of the space, a third.


def test_nothing_valid_leaves_no_preset(tmp_path):
    engine = FakeEngine(outcome=lambda config: Outcome(Status.COMPILE_ERROR, message="no"))
    result = search(tmp_path, engine, trials=6)
    assert result.best is None
    assert result.counts == {"compile_error": 6}
    assert not (tmp_path / "presets").exists()


def test_a_wrong_winner_is_marked_and_the_next_best_taken(tmp_path):
    engine = FakeEngine(right=lambda config: config["mode"] != "b")
    result = search(tmp_path, engine, trials=60)
    assert engine.validated[0] == BEST
    assert result.best.config == {**BEST, "mode": "a"}
    assert result.rejected[0].status is Status.WRONG_RESULT
    assert result.counts["wrong_result"] == len(result.rejected) == len(engine.validated) - 1
    (preset,) = presets.read(result.preset)
    assert preset.config == {**BEST, "mode": "a"}
    assert preset.validation["max_rel_error"] == 1e-3


def test_a_resumed_study_remembers_what_was_wrong(tmp_path):
    search(tmp_path, FakeEngine(right=lambda config: config["mode"] != "b"), trials=60)
    engine = FakeEngine()
    result = search(tmp_path, engine, trials=61)
    assert all(config["mode"] != "b" for config in engine.validated)
    assert result.best.config["mode"] == "a"


def test_a_baseline_that_breaks_a_constraint_is_refused_before_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyKernel, "baselines", lambda *_: {"default": {"block_m": 100, "block_n": 128, "mode": "a"}})
    engine = FakeEngine()
    result = search(tmp_path, engine, trials=6)
    assert result.baselines["default"].status is Status.INVALID
    assert "block_m must divide m" in result.baselines["default"].message
    assert result.counts == {"ok": 5, "invalid": 1}
    assert all(config["block_m"] != 100 for config in engine.evaluated)


def test_a_baseline_outside_the_candidates_is_tried_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyKernel, "baselines", lambda *_: {"default": {"block_m": 64, "block_n": 128, "mode": "a"}})
    result = search(tmp_path, trials=6)
    assert result.baselines["default"].ok
    assert result.counts == {"ok": 6}


def test_the_budget_ends_the_search_and_the_best_is_kept(tmp_path):
    hang: Future[None] = Future()
    calls = []

    def outcome(config):
        calls.append(config)
        if len(calls) > 4:
            hang.result(timeout=30)
        return timed(config)

    class Release(Observer):
        def validating(self, record):
            hang.set_result(None)

    result = search(tmp_path, FakeEngine(outcome=outcome), Release(), trials=50, budget_s=1.0)
    assert result.stopped_because is StopReason.BUDGET
    assert result.preset.exists()


def test_ctrl_c_ends_cleanly_and_the_same_request_goes_on(tmp_path):
    class Interrupts(Observer):
        seen = 0

        def trial(self, record):
            self.seen += 1
            if self.seen == 10:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # a job in the background inherits another than Python's
    result = search(tmp_path, FakeEngine(), Interrupts(), trials=50)
    assert result.stopped_because is StopReason.INTERRUPTED
    assert 10 <= sum(result.counts.values()) < 20
    assert result.best is not None
    assert result.preset.exists()
    assert signal.getsignal(signal.SIGINT) is before
    assert sum(search(tmp_path, trials=50).counts.values()) == 50


def test_a_second_ctrl_c_keeps_nothing_that_was_not_validated(tmp_path):
    class Interrupts(Observer):
        def trial(self, record):
            os.kill(os.getpid(), signal.SIGINT)

        def validating(self, record):
            os.kill(os.getpid(), signal.SIGINT)

    result = search(tmp_path, FakeEngine(), Interrupts(), trials=50)
    assert result.stopped_because is StopReason.INTERRUPTED
    assert result.best is None
    assert result.unvalidated.outcome.ok
    assert not (tmp_path / "presets").exists()


def test_the_result_is_plain_json(tmp_path):
    document = json.loads(json.dumps(search(tmp_path, trials=12).to_dict(), allow_nan=False))
    assert {"kernel", "problem", "target", "engine", "trials", "best", "baselines", "speedup"} <= set(document)
    assert {"seconds", "stopped_because", "study", "preset"} <= set(document)
    assert document["best"]["validated"] is True
    assert document["best"]["measured"] is False
    assert set(document["baselines"]) == set(document["speedup"]) == {"default", "xla"}


def test_an_unreadable_preset_file_stops_the_run_before_anything_is_tried(tmp_path):
    path = presets.preset_path(tmp_path / "presets", "TPU v5 lite", "toy")
    path.parent.mkdir(parents=True)
    path.write_text("{ not json")
    engine = FakeEngine()
    with pytest.raises(ResultsError, match=r"toy\.json"):
        search(tmp_path, engine, trials=5)
    assert engine.evaluated == []
    assert path.read_text() == "{ not json"


def test_another_stack_or_kind_of_time_is_another_study(tmp_path, monkeypatch):
    def study(name: str = "compiler", **versions: str) -> str:
        monkeypatch.setattr("autotune.versions.installed", lambda: {"jax": "1", "libtpu": "1"} | versions)
        return search(tmp_path, FakeEngine(name=name), trials=3).study

    names = [study(), study("analytic"), study(jax="2"), study(libtpu="2"), study()]
    assert len(set(names)) == 4
    assert names[0] == names[-1]
    monkeypatch.setattr("autotune.versions.installed", dict)
    search(tmp_path, trials=3, study="mine")
    with pytest.raises(UsageError, match="made for engine compiler"):
        search(tmp_path, FakeEngine(name="analytic"), trials=3, study="mine")


MACHINE = (Status.CRASH, Status.TIMEOUT)


@pytest.mark.parametrize("status", MACHINE)
def test_what_the_machine_failed_is_tried_again_and_what_the_config_failed_is_not(tmp_path, status):
    def poor(config):
        if config["mode"] == "c":
            return Outcome(Status.VMEM_OOM, message="too much")
        return timed(config) if config["block_m"] == 256 else Outcome(status, message="no memory")

    faulty = FakeEngine(outcome=poor, timeout_s=60, reference=Outcome(status))
    first = search(tmp_path, faulty, trials=30)
    assert first.baselines["default"].status is first.baselines["xla"].status is status
    engine = FakeEngine(timeout_s=61)
    again = search(tmp_path, engine, trials=30)
    assert len(engine.evaluated) == len(engine.distinct) == first.counts[status.value]
    assert {config_key(config) for config in faulty.evaluated} >= engine.distinct
    assert again.counts == {"ok": 30 - first.counts["vmem_oom"], "vmem_oom": first.counts["vmem_oom"]}
    assert again.baselines["default"].ok
    assert again.baselines["xla"].ok
    (preset,) = presets.read(again.preset)
    assert preset.baselines["xla"]["time_ms"] == 3.0
    last = FakeEngine(timeout_s=61)
    search(tmp_path, last, trials=30)
    assert last.evaluated == []


def test_a_timeout_stays_one_until_it_is_given_more_time(tmp_path):
    search(tmp_path, FakeEngine(outcome=lambda config: Outcome(Status.TIMEOUT), timeout_s=60), trials=6)
    engine = FakeEngine(timeout_s=60)
    assert search(tmp_path, engine, trials=6).counts == {"timeout": 6}
    assert engine.evaluated == []


def test_a_machine_that_stays_broken_costs_each_config_one_more_trial_a_run(tmp_path):
    for _ in range(2):
        engine = FakeEngine(outcome=lambda config: Outcome(Status.CRASH, message="no memory\nat all"))
        result = search(tmp_path, engine, trials=6)
        assert result.counts == {"crash": 6}
        assert len(engine.evaluated) == 6
        assert result.messages == {"crash": "no memory"}


@pytest.mark.parametrize("status", MACHINE)
def test_a_validation_that_did_not_end_is_tried_once_more_and_is_no_verdict(tmp_path, status):
    failures = [Validation(status, message="killed")]
    engine = FakeEngine(verdict=lambda config: failures.pop() if failures else Validation(Status.OK, 1e-3))
    assert search(tmp_path / "once", engine, trials=45).best.config == BEST
    assert engine.validated == [BEST, BEST]

    dies = FakeEngine(verdict=lambda config: Validation(Status.OK if config != BEST else status, 1e-3))
    result = search(tmp_path / "always", dies, trials=45)
    assert dies.validated[:2] == [BEST, BEST]
    assert result.best.config != BEST
    assert result.rejected == ()
    assert result.counts == {"ok": 45}
    assert search(tmp_path / "always", trials=45).best.config == BEST  # The next run finds out.


def test_a_kernel_that_is_wrong_everywhere_is_given_up(tmp_path):
    engine = FakeEngine(right=lambda config: False)
    result = search(tmp_path, engine, trials=30)
    assert len(engine.validated) == REFUSALS_IN_A_ROW
    assert result.best is result.preset is None
    assert result.gave_up
    assert result.messages == {"wrong_result": "off by half on m=256"}


RUN = """
    import os, sys, time
    from pathlib import Path
    from autotune.search import SearchSettings
    from autotune.tuner import tune
    from tests.fakes import FakeEngine, timed, toy_task

    folder, others = Path(sys.argv[1]), sys.argv[3:]

    def outcome(config):
        if others:  # On a busy machine one starts seconds after the other: the first trial waits for all.
            (folder / f"ready-{os.getpid()}").touch()
            while len(list(folder.glob("ready-*"))) < int(others[0]):
                time.sleep(0.01)
        time.sleep(0.05)
        return timed(config)

    with FakeEngine(outcome=outcome) as engine:
        settings = SearchSettings(trials=int(sys.argv[2]), seed=0, results=folder)
        result = tune(engine.task, engine, settings)
    print(len(engine.evaluated), result.stopped_because.value, sum(result.counts.values()))
"""


@pytest.mark.parametrize(("trials", "reason"), [(30, "trials"), (1000, "space exhausted")])
def test_two_runs_at_once_share_the_trials(tmp_path, trials, reason):
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(tmp_path), str(trials), "2"]
    runs = [
        subprocess.Popen(
            command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    evaluated = [int(out.split()[0]) for out, _ in outputs]
    assert all(reason in out for out, _ in outputs)
    most = min(trials, SPACE.size)
    assert most <= sum(evaluated) <= most + 3  # By what one of them may have in flight.
    assert min(evaluated) > 0


FOREIGN = {
    "a status of a newer version": ('"status": "ok"', '"status": "splendid"'),
    "an outcome that is no object": ('"outcome": {', '"outcome": 7, "was": {'),
    "a time that is a word": ('"time_ms": ', '"time_ms": "long", "was_ms": '),
    "an unknown operation": ('"op_code": 6', '"op_code": 66'),
    "a record that is no object": ("\n", "\n[1]\n"),
    "a record that is no JSON": ("\n", "\n{]\n"),
}


@pytest.mark.parametrize("change", FOREIGN, ids=str)
def test_a_journal_of_foreign_content_is_one_line_that_names_it(tmp_path, change):
    study = search(tmp_path, trials=5, study="mine").study
    journal = tmp_path / "studies" / f"{study}.journal"
    text = "".join(json.dumps(json.loads(line)) + "\n" for line in journal.read_text().splitlines())
    old, new = FOREIGN[change]
    assert old in text
    journal.write_text(text.replace(old, new))
    before = journal.read_bytes()
    task, settings = toy_task(), SearchSettings(results=tmp_path, study="mine")
    for attempt in (
        lambda: check(task, settings),
        lambda: search(tmp_path, study="mine"),
        lambda: load_records(tmp_path, "mine"),
    ):
        with pytest.raises(ResultsError, match=r"mine\.journal") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert journal.read_bytes() == before


def test_blank_lines_and_fields_of_a_newer_version_do_no_harm(tmp_path):
    study = search(tmp_path, trials=5).study
    journal = tmp_path / "studies" / f"{study}.journal"
    lines = [json.dumps(json.loads(line)) for line in journal.read_text().splitlines()]
    text = "\n\n".join(lines).replace('"status": "ok"', '"status": "ok", "mood": "good"')
    journal.write_text(text + "\n\n  \n")
    engine = FakeEngine()
    assert search(tmp_path, engine, trials=8).counts == {"ok": 8}
    assert len(engine.evaluated) == 3
    assert len(load_records(tmp_path, study)) == 8


def test_a_check_changes_nothing(tmp_path):
    results = tmp_path / "results"
    for storage in (None, str(tmp_path / "study.log"), f"journal:{tmp_path}/deep/study.log"):
        check(toy_task(), SearchSettings(results=results, storage=storage))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("storage", ["/dev/full", "{}", "{}/" + "x" * 252, "{}/file/study.log"])
def test_a_storage_that_cannot_be_used_is_refused_by_the_check(tmp_path, storage):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="--storage"):
        check(toy_task(), SearchSettings(results=tmp_path, storage=storage.format(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_password_is_not_shown(tmp_path):
    with pytest.raises(UsageError) as caught:
        check(toy_task(), SearchSettings(results=tmp_path, storage="mysql://me:secret@nowhere.invalid/x"))
    assert "secret" not in str(caught.value)


def test_a_full_disk_leaves_the_journal_whole(tmp_path):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n" + textwrap.dedent(RUN)
    failed = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path), "60"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert failed.stderr.splitlines()[-1].startswith("OSError: [Errno 27] File too large")
    (journal,) = (tmp_path / "studies").glob("*.journal")
    assert journal.read_bytes().endswith(b"\n")
    assert str(journal) in failed.stderr.splitlines()[-1]
    assert search(tmp_path, trials=20).counts == {"ok": 20}


def test_very_many_trials_are_ranked_in_no_time(tmp_path, monkeypatch):
    sizes = tuple(range(8, 808, 8))
    space = Space([Param("block_m", sizes, ""), Param("block_n", sizes, ""), Param("mode", ("a", "b", "c"), "")], [])
    monkeypatch.setattr(ToyKernel, "space", lambda *_: space)
    began = time.monotonic()
    search(tmp_path, trials=10**9, budget_s=1.0)
    assert time.monotonic() - began < 15


def test_a_database_that_fails_is_one_line(tmp_path):
    class Drops(Observer):
        def trial(self, record):
            with sqlite3.connect(tmp_path / "study.db") as database:
                database.execute("DROP TABLE IF EXISTS trials")

    with pytest.raises(AutotuneError, match=r"study\.db failed: .*no such table") as caught:
        search(tmp_path, observer=Drops(), trials=20, storage=f"sqlite:///{tmp_path}/study.db")
    assert "\n" not in str(caught.value)


def test_arithmetic_alone_beats_nothing_that_the_schedule_showed(tmp_path):
    """A config whose schedule could not be played has an estimate, however good, and no prediction."""

    def outcome(config: Config) -> Outcome:
        unknown = config["mode"] == "a"
        return Outcome(
            Status.OK,
            time_ms=toy_time(config) * (0.01 if unknown else 1.0),
            source=Source.ANALYTIC if unknown else Source.SCHEDULE,
        )

    result = search(tmp_path, FakeEngine(outcome=outcome), trials=45)
    assert result.best.outcome.source is Source.SCHEDULE
    estimated = FakeEngine(outcome=lambda config: Outcome(Status.OK, time_ms=1.0, source=Source.ANALYTIC))
    only = search(tmp_path / "other", estimated, trials=5)
    assert only.best.outcome.source is Source.ANALYTIC

"""What wins where times are measured: races, baselines that stand, predictions beside measurements."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pandas
import pytest

from autotune import engines, presets
from autotune.cli import main
from autotune.foresight import Foresight, agreement, predict
from autotune.outcome import Outcome, Source, Status
from autotune.report.write import write_reports
from autotune.search import SearchSettings, StopReason, TrialRecord
from autotune.search.study import load_records
from autotune.space import config_key
from autotune.tuner import REFUSALS_IN_A_ROW, Observer, tune
from autotune.tuner.choice import VALIDATION_ATTEMPTS
from autotune.tuner.finals import CONFIRMATIONS, FINALISTS
from autotune.validation import Validation
from tests.fakes import FakeEngine, measured, timed, toy_task, toy_time

FASTEST = {"block_m": 1024, "block_n": 512, "mode": "b"}
DEFAULT = {"block_m": 128, "block_n": 128, "mode": "a"}


def device(**behaviour) -> FakeEngine:
    task = toy_task("large")
    return FakeEngine(task, jobs=1, name="device", measures=True, **{"outcome": measured, **behaviour})


def run(engine: FakeEngine, folder: Path, trials: int = 30):
    return tune(engine.task, engine, SearchSettings(trials=trials, results=folder))


def test_the_winner_is_measured_beside_the_baselines_in_fresh_processes(tmp_path):
    engine = device(reference_ms=3.0)
    result = run(engine, tmp_path, trials=60)
    assert result.gain
    assert result.best.config == FASTEST
    fresh = [entries for entries, in_a_fresh_one in engine.races if in_a_fresh_one]
    assert fresh == [[FASTEST, DEFAULT], [FASTEST, None]] * CONFIRMATIONS
    ratio = result.ratio("default")
    assert ratio.low <= toy_time(DEFAULT) / toy_time(FASTEST) <= ratio.high
    assert result.speedup("default") == ratio.value
    low, high = result.best.outcome.interval_ms
    assert low <= toy_time(FASTEST) <= high
    document = result.to_dict()
    assert document["gain"] is True
    assert document["speedup_interval"]["default"] == [ratio.low, ratio.high]
    preset = presets.read(result.preset)[0]
    assert preset.measured
    assert preset.baselines["default"]["speedup_interval"] == [ratio.low, ratio.high]
    assert preset.speedup("default") == pytest.approx(ratio.value)


def test_a_lucky_measurement_does_not_win(tmp_path):
    """A trial said 20 % less than the truth; in the race it is the slower one."""
    lucky = {"block_m": 1024, "block_n": 256, "mode": "b"}

    class Lucky(FakeEngine):
        def evaluate(self, config):
            outcome = measured(config, 0.5 if dict(config) == lucky else 1.0)
            return self._pool.submit(lambda: outcome)

    engine = Lucky(toy_task("large"), jobs=1, name="device", measures=True, outcome=measured)
    near = {"block_m": 1024, "block_n": 512, "mode": "b"}
    assert toy_time(lucky) * 0.5 < toy_time(near) < toy_time(lucky)
    result = run(engine, tmp_path, trials=60)
    # Within 10 % of the lucky one there is none: it goes on alone, and the confirmation has its true time.
    assert result.best.config == lucky
    assert result.best.outcome.time_ms == pytest.approx(toy_time(lucky), rel=0.02)


def test_close_ones_race_and_the_truly_faster_wins(tmp_path):
    truth = {128: 2.0, 256: 1.00, 512: 1.02, 1024: 1.04, 2048: 1.5}
    seen = {**truth, 256: 1.05, 512: 1.03, 1024: 1.01}

    class Noisy(FakeEngine):
        def evaluate(self, config):
            time_ms = seen[config["block_m"]] + 5 * (config["block_n"] != 512 or config["mode"] != "b")
            return self._pool.submit(lambda: Outcome(Status.OK, time_ms=time_ms, source=Source.DEVICE))

    def true(config):
        return Outcome(Status.OK, time_ms=truth[config["block_m"]], source=Source.DEVICE)

    engine = Noisy(toy_task("large"), jobs=1, name="device", measures=True, outcome=true)
    result = run(engine, tmp_path, trials=75)
    assert result.best.config == {"block_m": 256, "block_n": 512, "mode": "b"}
    raced = [entries for entries, fresh in engine.races if not fresh]
    assert len(raced) == 1
    assert 2 <= len(raced[0]) <= FINALISTS
    assert engine.validated == [dict(result.best.config), DEFAULT]  # the others need not be


def test_a_config_that_dies_while_it_is_validated_leaves_the_next_ones(tmp_path):
    """It is far faster than the others, and gives no verdict that the study could remember."""
    tried = []

    class Dies(FakeEngine):
        def validate(self, config):
            tried.append(dict(config))
            if dict(config) == FASTEST:
                return self._pool.submit(lambda: Validation(Status.CRASH, message="it died"))
            return super().validate(config)

    def time_of(config):
        fast = dict(config) == FASTEST
        return Outcome(Status.OK, time_ms=0.01 if fast else toy_time(config), source=Source.DEVICE)

    engine = Dies(toy_task("large"), jobs=1, name="device", measures=True, outcome=time_of)
    result = run(engine, tmp_path, trials=60)
    assert not result.gave_up
    assert result.best.config not in (FASTEST, DEFAULT)
    assert tried.count(FASTEST) == VALIDATION_ATTEMPTS


def test_one_that_is_right_is_found_behind_many_that_are_wrong_and_far_faster(tmp_path):
    """What does less than it should is often fast; here each is alone in its group of finalists."""
    task = toy_task("large")
    places = {config_key(config): place for place, config in enumerate(task.kernel.space(task.problem, task.chip), 1)}
    places[config_key(DEFAULT)] = 40

    def time_of(config):
        return Outcome(Status.OK, time_ms=1.3 ** places[config_key(config)], source=Source.DEVICE)

    engine = device(outcome=time_of, right=lambda config: places[config_key(config)] > REFUSALS_IN_A_ROW)
    result = run(engine, tmp_path, trials=75)
    assert places[config_key(result.best.config)] == REFUSALS_IN_A_ROW + 1
    assert result.counts["wrong_result"] == REFUSALS_IN_A_ROW - 1  # the first place is the default's, which is right
    assert not result.gave_up


def test_where_nothing_is_shown_to_be_faster_the_baseline_stands(tmp_path, capsys):
    engine = device(outcome=lambda config: Outcome(Status.OK, time_ms=2.0, source=Source.DEVICE))
    result = run(engine, tmp_path)
    assert not result.gain
    assert result.best.config == DEFAULT
    assert result.best.validation.ok
    assert result.to_dict()["gain"] is False
    assert result.to_dict()["speedup_interval"] == {}
    preset = presets.read(result.preset)[0]
    assert preset.config == DEFAULT
    assert preset.speedup("default") == pytest.approx(1.0)


def test_a_baseline_that_is_wrong_does_not_stand_and_no_gain_over_it_is_claimed(tmp_path):
    engine = device(
        outcome=lambda config: Outcome(Status.OK, time_ms=2.0, source=Source.DEVICE),
        right=lambda config: dict(config) != DEFAULT,
    )
    result = run(engine, tmp_path)
    assert result.gain is None
    assert result.best.config != DEFAULT


class Failing(FakeEngine):
    """Races fail where one of `bad` takes part."""

    bad: tuple = ()

    def _race(self, entries, draw):
        race = super()._race(entries, draw)
        if any(entry in self.bad for entry in entries):
            return dataclasses.replace(race, status=Status.TIMEOUT, samples=(), message="race: no result within 4 s")
        return race


def test_a_baseline_that_fails_beside_the_others_does_not_take_the_winner_with_it(tmp_path):
    engine = Failing(toy_task("large"), jobs=1, name="device", measures=True, outcome=measured)
    engine.bad = (None,)
    result = run(engine, tmp_path, trials=60)
    assert result.best.config == FASTEST
    assert result.gain is True
    assert set(result.final.ratios) == {"default"}
    assert result.ratio("xla") is None


def test_a_winner_that_cannot_run_again_gives_way_to_the_next(tmp_path):
    engine = Failing(toy_task("large"), jobs=1, name="device", measures=True, outcome=measured)
    engine.bad = (FASTEST,)
    result = run(engine, tmp_path, trials=75)
    assert result.best is not None
    others = [record.config for record in load_records(tmp_path, result.study) if record.config != FASTEST]
    assert toy_time(result.best.config) == min(map(toy_time, others))


def test_a_gain_over_what_was_not_compared_is_not_claimed(tmp_path):
    engine = Failing(toy_task("large"), jobs=1, name="device", measures=True, outcome=measured)
    engine.bad = (DEFAULT,)
    result = run(engine, tmp_path, trials=60)
    assert result.best.config == FASTEST
    assert result.gain is None
    assert set(result.final.ratios) == {"xla"}
    assert result.to_dict()["gain"] is None


def test_the_newer_of_two_measurements_stays_unless_it_was_shown_to_be_slower(tmp_path):
    result = run(device(), tmp_path, trials=60)
    kept = presets.read(result.preset)[0]
    low, high = kept.interval_ms
    unlucky = dataclasses.replace(kept, time_ms=high * 1.01, interval_ms=(high * 0.99, high * 1.02))
    slower = dataclasses.replace(kept, time_ms=high * 1.2, interval_ms=(high * 1.1, high * 1.3))
    assert unlucky.beats(kept)
    assert not slower.beats(kept)
    assert kept.beats(slower)
    assert low < high


def test_without_the_races_nothing_is_kept(tmp_path):
    class Broken(FakeEngine):
        def _race(self, entries, draw):
            return dataclasses.replace(super()._race(entries, draw), status=Status.CRASH, message="ended by SIGABRT")

    class Told(Observer):
        def says(self, line):
            said.append(line)

    said: list[str] = []
    engine = Broken(toy_task("large"), jobs=1, name="device", measures=True, outcome=measured)
    result = tune(engine.task, engine, SearchSettings(trials=30, results=tmp_path), Told())
    assert f"{CONFIRMATIONS} of {CONFIRMATIONS} races failed: crash: ended by SIGABRT" in said
    assert result.best is None
    assert result.unvalidated is not None
    assert result.preset is None


class Interrupted(Observer):
    """Ctrl-C when something is said that begins so, or when a config's validation begins."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def validating(self, record):
        if self.moment == "validating the default" and record.config == DEFAULT:
            os.kill(os.getpid(), signal.SIGINT)

    def says(self, line):
        if line.startswith(self.moment):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("moment", ["validating the default", "racing", "measuring"])
def test_interrupted_finals_show_no_gain_and_are_over_at_once(tmp_path, monkeypatch, moment):
    """Also where the baseline was not looked at any more: against nothing, everything is a gain."""
    monkeypatch.setattr("autotune.tuner.choice.INTERRUPTED_GRACE_S", 0.0)
    hold = threading.Event()
    begun: list[object] = []

    class Slow(FakeEngine):
        def validate(self, config):
            return (
                self._pool.submit(hold.wait)
                if moment.startswith("val") and config == DEFAULT
                else (super().validate(config))
            )

        def _race(self, entries, draw):
            begun.append(entries)
            hold.wait()
            return super()._race(entries, draw)

    def close_together(config):
        time_ms = 3.0 if dict(config) == DEFAULT else 1.0 + 1e-5 * config["block_m"]
        return Outcome(Status.OK, time_ms=time_ms, source=Source.DEVICE)

    engine = Slow(
        toy_task("large"),
        jobs=1,
        name="device",
        measures=True,
        outcome=close_together if moment == "racing" else measured,
    )
    try:
        result = tune(engine.task, engine, SearchSettings(trials=60, results=tmp_path), Interrupted(moment))
    finally:
        hold.set()
    assert result.best is None
    assert result.final is None
    assert result.preset is None
    assert result.stopped_because is StopReason.INTERRUPTED
    engine.close()
    assert len(begun) <= 1  # those that wait their turn are given up


def test_no_gain_names_only_the_baselines_it_is_none_over(tmp_path, capsys):
    from autotune.cli.tune import _show

    engine = device(outcome=lambda config: Outcome(Status.OK, time_ms=2.0, source=Source.DEVICE), reference_ms=3.0)
    result = run(engine, tmp_path)
    assert result.final.ratios["xla"].low > 1
    _show(result)
    out = " ".join(capsys.readouterr().out.split())
    assert "No gain" in out
    assert "against xla" not in out


def test_what_was_predicted_decides_what_is_measured_first_and_is_kept_beside_it(tmp_path):
    predicting = FakeEngine(toy_task("large"), jobs=1)
    settings = SearchSettings(trials=40, results=tmp_path)
    predicted: list[TrialRecord] = []
    predict(predicting, settings, predicted.append, started=time.monotonic())
    assert len(predicted) == 40
    known = Foresight(predicting.task, settings)
    best = known.best(40)
    assert len(best) == 20
    times = [toy_time(config) for config in best]
    assert times == sorted(times)
    engine = device()
    result = tune(engine.task, engine, dataclasses.replace(settings, trials=20))
    assert engine.evaluated[0] == DEFAULT
    assert best[0] in engine.evaluated[:4]
    assert engine.evaluated[3:9] == [config for config in best if config not in engine.evaluated[:3]][:6]
    assert result.agreement.source is Source.SCHEDULE
    assert result.agreement.spearman > 0.99  # these predictions are the truth
    table = pandas.read_csv(write_reports(tmp_path, ["toy"], ["csv"])["toy"][0])
    ratio = result.ratio("default")
    assert table.speedup_default_low[0] == pytest.approx(ratio.low)
    assert table.speedup_default_high[0] == pytest.approx(ratio.high)
    assert table.time_low_ms[0] <= table.time_ms[0] <= table.time_high_ms[0]
    report = write_reports(tmp_path, ["toy"], ["md"])["toy"][0].read_text()
    assert "Predicted beside measured" in report
    assert "rank correlation 1.00" in report
    assert "measured on v5e" in report


def test_predictions_already_made_are_not_made_again(tmp_path):
    settings = SearchSettings(trials=10, results=tmp_path)
    predict(FakeEngine(toy_task("large"), jobs=1), settings, lambda record: None, started=time.monotonic())
    again = FakeEngine(toy_task("large"), jobs=1)
    predict(again, settings, lambda record: None, started=time.monotonic())
    assert again.evaluated == []


def test_agreement_needs_three_and_one_kind_of_prediction():
    def record(number: int, time_ms: float, predicted_ms: float | None, source=Source.SCHEDULE) -> TrialRecord:
        outcome = Outcome(
            Status.OK, time_ms=time_ms, source=Source.DEVICE, predicted_ms=predicted_ms, predicted_by=source
        )
        return TrialRecord(number, {"n": number}, outcome)

    two = [record(1, 1.0, 1.0), record(2, 2.0, 2.0)]
    assert agreement(two) is None
    mixed = [*two, record(3, 3.0, 1.5), record(4, 9.0, 0.1, Source.ANALYTIC), record(5, 5.0, None)]
    agreed = agreement(mixed)
    assert (agreed.configs, agreed.source) == (3, Source.SCHEDULE)
    assert agreed.spearman == pytest.approx(0.5)


def opened_by(monkeypatch, **device_behaviour) -> dict[str, list[FakeEngine]]:
    """The command line then finds a v5e attached, and opens fake engines."""
    opened: dict[str, list[FakeEngine]] = {"compiler": [], "device": []}

    def open_engine(name, task, *, jobs, timeout_s, pod=None):
        behaviour = {"outcome": measured, "measures": True, **device_behaviour} if name == "device" else {}
        engine = FakeEngine(task, jobs=1, timeout_s=timeout_s, name=name, **behaviour)
        opened[name].append(engine)
        return engine

    monkeypatch.setattr(engines, "open_engine", open_engine)
    monkeypatch.setattr(engines, "choose", lambda name, target, pod=None: (name, toy_task("large").chip))
    return opened


def test_the_command_predicts_first_and_then_measures(toy_registered, monkeypatch, tmp_path, capsys):
    opened = opened_by(monkeypatch)
    assert main(["toy", "--engine", "device", "--trials", "12", "--problem", "large", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr()
    assert "predicting 12 configs, to measure the best of them first" in out.err
    assert len(opened["compiler"][0].evaluated) == len(opened["device"][0].evaluated) == 12
    assert "Times are measured on v5e by wall clock." in out.out
    # What the sampler chose besides may not have been predicted; what was, was predicted rightly.
    agreed = re.search(r"ranked (\d+) of the measured configs with a correlation of 1\.00", " ".join(out.out.split()))
    assert agreed is not None, out.out
    assert 6 <= int(agreed[1]) <= 12


def test_ctrl_c_while_predicting_measures_nothing(toy_registered, monkeypatch, tmp_path):
    opened = opened_by(monkeypatch)
    monkeypatch.setattr("autotune.cli.tune.predict", lambda *_, **__: StopReason.INTERRUPTED)
    assert (
        main(["toy", "--engine", "device", "--trials", "12", "--problem", "large", "--results", str(tmp_path)]) == 130
    )
    assert opened["device"] == []


def test_a_predicted_preset_is_confirmed_against_its_runner_ups(toy_registered, monkeypatch, tmp_path, capsys):
    """The schedule put 512 first; the device has 1024 before it, which was predicted next."""

    def predicted(config):
        return dataclasses.replace(timed(config), time_ms=toy_time(config) * (0.4 if config["block_m"] == 512 else 1))

    opened = opened_by(monkeypatch)
    task = toy_task("large")
    found = tune(task, FakeEngine(task, jobs=1, outcome=predicted), SearchSettings(trials=75, results=tmp_path))
    assert found.best.config["block_m"] == 512
    assert main(["presets", "confirm", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)[0]
    assert document["predicted_ms"] == found.best.outcome.time_ms
    assert document["best"]["measured"] is True
    measured_first = opened["device"][0].evaluated
    assert measured_first[:2] == [DEFAULT, dict(found.best.config)]
    assert len(measured_first) == 1 + FINALISTS
    kept = presets.read(found.preset)
    assert [preset.measured for preset in kept] == [True]
    assert kept[0].config == document["best"]["config"]
    assert toy_time(kept[0].config) == min(toy_time(config) for config in measured_first)
    assert main(["presets", "confirm", "--results", str(tmp_path)]) == 2
    assert "has no predicted presets for TPU v5 lite" in capsys.readouterr().err

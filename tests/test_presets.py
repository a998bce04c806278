"""Presets: what is kept, what is looked up."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import presets
from autotune.chips import get_chip
from autotune.cli import main
from autotune.errors import ResultsError, UsageError
from autotune.kernel import get_kernel
from autotune.outcome import Source
from autotune.presets import Preset
from autotune.report import write_reports
from autotune.search import SearchSettings
from autotune.tuner import tune
from tests.fakes import FakeEngine, ToyKernel, ToyProblem

V5E = "TPU v5 lite"
KERNEL = ToyKernel()
CONFIG = {"block_m": 1024, "block_n": 512, "mode": "b"}


def preset(time_ms: float = 1.0, *, problem: ToyProblem = KERNEL.problems["small"], **changes) -> Preset:
    fields = {
        "kernel": "toy",
        "device_kind": V5E,
        "problem": problem.to_dict(),
        "config": CONFIG,
        "time_ms": time_ms,
        "method": "schedule",
        "engine": "compiler",
        "validation": {"status": "ok", "max_rel_error": 1e-3},
        "versions": {"kernel": KERNEL.version},
    }
    return Preset(**{**fields, **changes})


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> Path:
    """An empty project folder, the only place where presets are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_PRESETS", raising=False)
    presets.notice.warn_once.cache_clear()
    return tmp_path


def keep(entry: Preset, folder: Path = Path("results/presets")) -> Path:
    path = presets.preset_path(folder, entry.device_kind, entry.kernel)
    presets.save(path, entry)
    return path


words = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
values = st.one_of(st.integers(1, 2**40), st.booleans(), st.none(), words)


@settings(max_examples=50, deadline=None)
@given(
    problem=st.dictionaries(words, values, max_size=4),
    config=st.dictionaries(words, values, max_size=4),
    time_ms=st.floats(1e-9, 1e9),
    error=st.floats(0, 1),
)
def test_what_is_saved_is_read_again(tmp_path_factory, problem, config, time_ms, error):
    path = tmp_path_factory.mktemp("presets") / "toy.json"
    entry = preset(
        time_ms, config=config, validation={"status": "ok", "max_rel_error": error}, baselines={"xla": {"time_ms": 2.0}}
    )
    entry = Preset(**{**entry.to_dict(), "problem": problem})
    assert presets.save(path, entry)
    assert presets.read(path) == [entry]


def test_one_readable_file_per_device_kind_and_kernel():
    path = keep(preset())
    assert path == Path("results/presets/tpu_v5_lite/toy.json")
    (fields,) = json.loads(path.read_text())
    assert fields["config"] == CONFIG
    assert len(path.read_text().splitlines()) > 10


@pytest.mark.parametrize(
    ("old", "new", "replaced"),
    [
        (preset(2.0), preset(1.0), True),
        (preset(1.0), preset(2.0), False),
        (preset(1.0), preset(1.0), False),
        (preset(1.0), preset(2.0, source="measured", method="device"), True),
        (preset(2.0, source="measured", method="device"), preset(1.0), False),
        (preset(1.0, method="analytic"), preset(2.0), True),
        (preset(1.0), preset(2.0, versions={"kernel": "newer"}), True),
        (preset(1.0, validation=None), preset(2.0), True),
        (preset(1.0, validation={"status": "wrong_result"}, source="measured", method="device"), preset(2.0), True),
        (preset(1.0, baselines={"xla": {"status": "crash"}}), preset(1.0, baselines={"xla": {"time_ms": 3.0}}), True),
    ],
)
def test_a_worse_result_never_replaces_a_better_one(old, new, replaced):
    path = presets.preset_path(Path("results/presets"), V5E, "toy")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([old.to_dict()]))
    assert presets.save(path, new) is replaced
    assert presets.read(path) == [new if replaced else old]


def test_an_unvalidated_result_is_never_kept():
    for validation in (None, {"status": "wrong_result", "max_rel_error": 1.0}):
        with pytest.raises(ValueError, match="not shown right"):
            keep(preset(validation=validation))
    assert not Path("results/presets").exists()


def test_other_problems_are_left_alone():
    path = keep(preset())
    keep(preset(problem=KERNEL.problems["large"]))
    assert [entry.problem["m"] for entry in presets.read(path)] == [2048, 8192]


@pytest.mark.parametrize("text", ["{", "{}", '[{"kernel": "toy"}]', "[1]", "\x00", "[" * 100_000])
def test_an_unreadable_file_is_named_and_untouched(text):
    path = keep(preset())
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"toy\.json"):
        presets.save(path, preset())
    with pytest.raises(ResultsError, match=r"toy\.json"):
        presets.lookup(KERNEL, KERNEL.problems["small"], device_kind=V5E)
    assert path.read_text() == text


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests.fakes import ToyProblem
        from tests.test_presets import preset
        from autotune import presets
        for i in range(12):
            presets.save(Path(sys.argv[1]), preset(problem=ToyProblem(m=int(sys.argv[2]), n=i + 1)))
    """)
    path = tmp_path / "v" / "toy.json"
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(m)], cwd=Path(__file__).parent.parent)
        for m in (1, 2, 3)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert len({(entry.problem["m"], entry.problem["n"]) for entry in presets.read(path)}) == 36
    assert [file.name for file in path.parent.iterdir() if file.suffix == ".tmp"] == []


def test_lookup_is_exact_and_silent():
    keep(preset())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind=V5E) == CONFIG
        assert presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind="v5e") == CONFIG


def test_a_miss_takes_the_nearest_and_warns_once_with_the_command():
    keep(preset(config={**CONFIG, "mode": "a"}))
    keep(preset(problem=KERNEL.problems["large"]))
    ask = {"m": 4096, "n": 8192}
    with pytest.warns(presets.PresetWarning, match="python -m autotune toy --target v5e --problem m=4096,n=8192"):
        config = presets.lookup(KERNEL, ask, device_kind=V5E)
    assert config["mode"] == "b"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert presets.lookup(KERNEL, ask, device_kind=V5E) == config


def test_what_is_borrowed_gets_all_the_vmem_that_a_kernel_may_take():
    """Under its own limit it was compiled for its own problem only: another one's blocks may be wider."""
    kernel = get_kernel("attention")
    problem, chip = kernel.parse_problem("q_len=2048,kv_len=2048"), get_chip("v5e")
    config = {**kernel.heuristic(problem, chip), "vmem_limit_mib": 16}
    keep(preset(kernel="attention", problem=problem, config=config, versions={"kernel": kernel.version}))
    assert presets.lookup(kernel, problem, device_kind=V5E)["vmem_limit_mib"] == 16
    with pytest.warns(presets.PresetWarning, match="took the one for"):
        borrowed = presets.lookup(kernel, problem.replace({"head_dim": 64}), device_kind=V5E)
    assert borrowed == {**config, "vmem_limit_mib": 96}


def test_the_nearest_must_be_valid_for_the_problem_asked_for():
    keep(preset())
    with pytest.warns(presets.PresetWarning, match="untuned"):
        config = presets.lookup(KERNEL, {"m": 256, "n": 256}, device_kind=V5E)
    assert KERNEL.space(ToyProblem(m=256, n=256), get_chip("v5e")).why_invalid(config) is None


@pytest.mark.parametrize("field", [{"dtype": "float32"}, {"causal": True}, {"cap": 30.0}])
def test_a_preset_of_other_words_or_flags_is_no_neighbour(field):
    keep(preset())
    with pytest.warns(presets.PresetWarning, match="untuned"):
        presets.lookup(KERNEL, {"m": 2048, "n": 2048, **field}, device_kind=V5E)


def test_how_large_an_option_is_is_a_matter_of_degree():
    keep(preset(problem=ToyProblem(m=2048, n=2048, cap=50.0)))
    keep(preset(config={**CONFIG, "mode": "a"}, problem=ToyProblem(m=2048, n=2048, cap=5.0)))
    with pytest.warns(presets.PresetWarning, match="took the one for .*cap=50"):
        assert presets.lookup(KERNEL, {"m": 2048, "n": 2048, "cap": 30.0}, device_kind=V5E) == CONFIG


def test_another_device_kind_is_never_borrowed_from():
    keep(preset())
    with pytest.warns(presets.PresetWarning, match="no preset for .* on v6e"):
        presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind="TPU v6 lite")


def test_without_any_preset_the_kernel_may_know_better():
    class Knowing(ToyKernel):
        def heuristic(self, problem, chip):
            return {"block_m": 2048, "block_n": 128, "mode": "c"}

    with pytest.warns(presets.PresetWarning):
        assert presets.lookup(Knowing(), {"m": 2048, "n": 2048}, device_kind=V5E)["mode"] == "c"


def test_a_preset_of_another_kernel_version_is_used_and_said_to_be_old():
    keep(preset(versions={"kernel": "older"}))
    with pytest.warns(presets.PresetWarning, match="renew it"):
        assert presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind=V5E) == CONFIG


def test_later_places_win_but_a_measurement_beats_a_prediction(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    monkeypatch.setenv("AUTOTUNE_PRESETS", str(mine))
    keep(preset())
    keep(preset(config={**CONFIG, "mode": "a"}), mine)
    ask = {"m": 2048, "n": 2048}
    assert presets.lookup(KERNEL, ask, device_kind=V5E)["mode"] == "a"
    keep(preset(config={**CONFIG, "mode": "c"}, source="measured", method="device"))
    assert presets.lookup(KERNEL, ask, device_kind=V5E)["mode"] == "c"


def test_using_comes_before_everything_and_ends(tmp_path):
    keep(preset(source="measured", method="device"))
    mine = keep(preset(config={**CONFIG, "mode": "a"}), tmp_path / "mine")
    ask = {"m": 2048, "n": 2048}
    with presets.using(mine):
        assert presets.lookup(KERNEL, ask, device_kind=V5E)["mode"] == "a"
        with presets.using({"toy": {"block_m": 128, "block_n": 128}}):
            assert presets.lookup(KERNEL, ask, device_kind=V5E) == {"block_m": 128, "block_n": 128, "mode": "a"}
        assert presets.lookup(KERNEL, ask, device_kind=V5E)["block_m"] == 1024
    with presets.using(tmp_path / "mine"):
        assert presets.lookup(KERNEL, ask, device_kind=V5E)["mode"] == "a"
    assert presets.lookup(KERNEL, ask, device_kind=V5E)["mode"] == "b"
    with pytest.raises(ResultsError, match="does not exist"), presets.using("nowhere.json"):
        pass


def test_a_new_file_is_seen_at_once():
    keep(preset(2.0))
    assert presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind=V5E)["mode"] == "b"
    keep(preset(1.0, config={**CONFIG, "mode": "a"}))
    assert presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind=V5E)["mode"] == "a"


def test_unknown_fields_and_devices_are_said():
    with pytest.raises(UsageError, match="unknown problem field 'q'"):
        presets.lookup(KERNEL, {"m": 1, "n": 1, "q": 1}, device_kind=V5E)
    with pytest.raises(UsageError, match="unknown target"):
        presets.lookup(KERNEL, {"m": 128, "n": 128}, device_kind="GeForce")


def test_looking_presets_up_loads_no_jax():
    script = "import sys; from autotune import presets; print({'jax', 'optuna', 'pandas'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "set()"


SOUND = json.loads(json.dumps(preset(baselines={"xla": {"time_ms": 2.0}}, roofline_ms=0.5, study="s").to_dict()))
JUNK = [None, True, 7, -1.0, float("nan"), float("inf"), 10**400, "word", "../../word", "\ud800"]
JUNK += [[], [[]], {}, {"a": {"b": []}}]
JUNK_IN = [{"time_ms": "x"}, {"time_ms": float("nan")}, {"status": 3}, {"status": "ok", "max_rel_error": "x"}, {"a": 1}]


@pytest.mark.parametrize("field", [*SOUND, "compute_ms", "bound", "date", "a_newer_versions_field"])
def test_a_malformed_field_is_said_before_a_search_or_does_no_harm_after_it(field, capfd):
    """Whatever is read must serve a lookup, a search's end and a report: else reading it must say so."""
    path = presets.preset_path(Path("results/presets"), V5E, "toy")
    path.parent.mkdir(parents=True)
    for junk in [*JUNK, *JUNK_IN, {"xla": {"time_ms": "x"}}, {"xla": None}]:
        text = json.dumps([{**SOUND, field: junk}])
        path.write_text(text)
        read, refusal = None, ""
        try:
            (read,) = presets.read(path)
        except ResultsError as error:
            refusal = str(error)
        if read is None:
            assert "toy.json" in refusal
            assert "\n" not in refusal
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            presets.lookup(KERNEL, KERNEL.problems["small"], device_kind=V5E)
        write_reports(Path("results"), [read.kernel], ("md", "csv"))
        assert main(["presets", "list", "--results", "results"]) == 0
        assert main(["presets", "check", "--results", "results"]) in (0, 1)
        presets.save(path, preset(0.1))
        assert presets.read(path)[-1].time_ms == 0.1
    capfd.readouterr()


@pytest.mark.parametrize("source", ["predicted", "measured"])
@pytest.mark.parametrize("method", [source.value for source in Source])
def test_only_what_a_device_timed_is_a_measurement(source, method, capfd):
    """A file may be written by hand or by another tool: it is not believed against itself."""
    path = presets.preset_path(Path("results/presets"), V5E, "toy")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([{**SOUND, "source": source, "method": method}]))
    if (source == "measured") == (method == "device"):
        assert presets.read(path)[0].measured == (method == "device")
        return
    with pytest.raises(ResultsError, match=f"source {source} and method {method} contradict each other"):
        presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind=V5E)
    assert main(["presets", "list", "--results", "results"]) == 2
    assert "contradict each other" in capfd.readouterr().err


def test_fields_of_a_newer_version_survive_a_rewrite():
    path = keep(preset())
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([{**entry, "mood": {"of": ["the", "day", 1]}, "extra": None}]))
    keep(preset(problem=KERNEL.problems["large"]))
    assert json.loads(path.read_text())[0] == {**entry, "mood": {"of": ["the", "day", 1]}, "extra": None}


def test_what_a_lookup_could_not_use_never_stays_for_being_faster():
    path = presets.preset_path(Path("results/presets"), V5E, "toy")
    path.parent.mkdir(parents=True)
    junk = [preset(0.1, config={"block_m": 7}), preset(0.1, config={**CONFIG, "block_q": 1}), preset(0.2)]
    path.write_text(json.dumps([entry.to_dict() for entry in junk[:2]]))
    assert presets.save(path, preset(1.0), lambda old: old.config == CONFIG)
    assert presets.read(path) == [preset(1.0)]
    path.write_text(json.dumps([entry.to_dict() for entry in junk]))
    assert not presets.save(path, preset(1.0), lambda old: old.config == CONFIG)
    assert presets.read(path) == junk


def test_a_tuned_result_takes_the_place_of_an_invalid_one(tmp_path):
    path = presets.preset_path(tmp_path / "presets", V5E, "toy")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([preset(1e-6, config={**CONFIG, "block_m": 100}).to_dict()]))
    with FakeEngine() as engine:
        result = tune(engine.task, engine, SearchSettings(trials=45, results=tmp_path))
    assert not result.kept
    assert [entry.config for entry in presets.read(path)] == [CONFIG]


def test_a_preset_from_before_its_problem_had_a_field_is_renewed(tmp_path):
    path = presets.preset_path(tmp_path / "presets", V5E, "toy")
    path.parent.mkdir(parents=True)
    old = preset(versions={"kernel": "older"}).to_dict()
    del old["problem"]["cap"]
    path.write_text(json.dumps([old, preset(problem=KERNEL.problems["large"]).to_dict()]))
    with FakeEngine() as engine:
        tune(engine.task, engine, SearchSettings(trials=45, results=tmp_path))
    assert [entry.problem["m"] for entry in presets.read(path)] == [2048, 8192]
    assert presets.read(path)[0].versions["kernel"] == KERNEL.version


def test_a_validated_preset_is_looked_up_before_one_that_is_not(tmp_path, monkeypatch):
    keep(preset())
    mine = presets.preset_path(tmp_path / "mine", V5E, "toy")
    mine.parent.mkdir(parents=True)
    mine.write_text(json.dumps([preset(0.1, validation=None, config={**CONFIG, "mode": "a"}).to_dict()]))
    monkeypatch.setenv("AUTOTUNE_PRESETS", str(tmp_path / "mine"))
    assert presets.lookup(KERNEL, {"m": 2048, "n": 2048}, device_kind=V5E)["mode"] == "b"


def test_tuning_begins_with_what_training_code_runs_today(tmp_path):
    """A preset of an older kernel is renewed in a few trials, whatever the ranking thinks of it."""
    worst = {"block_m": 2048, "block_n": 128, "mode": "c"}
    keep(preset(config=worst, versions={"kernel": "older"}))
    with FakeEngine() as engine:
        tune(engine.task, engine, SearchSettings(trials=2, results=tmp_path))
        assert [dict(config) for config in engine.evaluated][1] == worst
    outside = {**worst, "block_m": 2049}  # Not among the candidates: it would make another study of it.
    keep(preset(0.1, config=outside))
    with FakeEngine() as engine:
        tune(engine.task, engine, SearchSettings(trials=2, results=tmp_path / "other"))
        assert outside not in [dict(config) for config in engine.evaluated]


@pytest.mark.parametrize("interval", [[5.0, 1.0], [1.0], [0.0, 1.0]])
def test_an_interval_that_is_none_is_refused(interval):
    fields = {"kernel": "toy", "device_kind": "cpu", "problem": {}, "config": {}, "time_ms": 1.0}
    assert Preset.from_dict({**fields, "interval_ms": [1.0, 1.0]}).interval_ms == [1.0, 1.0]
    with pytest.raises(ValueError, match="the smaller first"):
        Preset.from_dict({**fields, "interval_ms": interval})

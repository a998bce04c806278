"""Reports: tuned beside baseline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from autotune import presets
from autotune.errors import UsageError
from autotune.kernel import get_kernel
from autotune.outcome import Outcome, Status
from autotune.presets import Preset
from autotune.report import write_reports
from autotune.search import SearchSettings
from autotune.tuner import tune
from tests.fakes import FakeEngine, timed, toy_task


def oom_when_large(config):
    return Outcome(Status.VMEM_OOM) if config["block_m"] == 2048 else timed(config)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """A results folder with two presets of the toy kernel."""
    results = tmp_path_factory.mktemp("results")
    for target in ("v5e", "v6e"):
        with FakeEngine(toy_task(target=target), outcome=oom_when_large) as engine:
            tune(engine.task, engine, SearchSettings(trials=50, results=results))
    return results


def test_markdown_and_csv(tuned):
    written = write_reports(tuned, [], ("md", "csv"))
    assert written == {"toy": [tuned / "reports" / "toy.md", tuned / "reports" / "toy.csv"]}
    text = written["toy"][0].read_text()
    for words in (
        "Times are predicted for v5e, v6e (compiler schedule), not measured.",
        "m=2048,n=2048,dtype=bfloat16,causal=false",
        "block_m=1024,block_n=512,mode=b",
        "1.000 ms",
        "4.02×",
        "| vmem_oom |",
        "Best so far",
    ):
        assert words in text
    frame = pd.read_csv(written["toy"][1])
    assert list(frame["target"]) == ["v5e", "v6e"]
    assert frame["time_ms"].tolist() == pytest.approx([1.0, 1.0])
    assert frame["speedup_default"].tolist() == pytest.approx([4.018, 4.018])
    assert frame["speedup_xla"].tolist() == pytest.approx([3.0, 3.0])
    assert frame["roofline_share"].between(0, 1).all()
    assert frame["max_rel_error"].tolist() == [1e-3, 1e-3]
    assert set(frame["source"]) == {"predicted"}
    assert frame["kernel_version"].notna().all()
    assert frame["date"].notna().all()


def test_every_markdown_row_has_its_tables_columns(tuned):
    (path,) = write_reports(tuned, ["toy"], ("md",))["toy"]
    for block in path.read_text().split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_html_needs_nothing_else(tuned):
    (path,) = write_reports(tuned, ["toy"], ("html",))["toy"]
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    assert "block_m=1024" in page


def test_without_the_study_the_presets_are_reported_all_the_same(tuned, tmp_path):
    shutil.copytree(tuned / "presets", tmp_path / "presets")
    (path,) = write_reports(tmp_path, [], ("md",))["toy"]
    assert "is not in this results folder" in path.read_text()
    assert not (tmp_path / "studies").exists()


def test_problems_that_differ_in_their_batch_alone_are_set_side_by_side(tmp_path):
    kernel = get_kernel("attention")

    def keep(time_ms: float, **fields):
        problem = {**kernel.parse_problem(None).to_dict(), **fields}
        entry = Preset(
            kernel="attention", device_kind="TPU v5 lite", problem=problem, config={"block_q": 128}, time_ms=time_ms,
            method="schedule", engine="compiler", validation={"status": "ok", "max_rel_error": 1e-3}, versions={},
        )  # fmt: skip
        presets.save(presets.preset_path(tmp_path / "presets", entry.device_kind, entry.kernel), entry)

    keep(6.0, batch=8)
    keep(1.0, batch=1)
    keep(9.0, batch=8, causal=False)  # another problem: it has no other batch
    (path,) = write_reports(tmp_path, [], ("md",))["attention"]
    text = path.read_text()
    assert text.count("Time against batch, v5e: ") == 1
    rows = [line for line in text.splitlines() if line.startswith(("| 1 |", "| 8 |"))]
    assert rows == [
        "| 1 | 1.000 ms | 1.000 ms | predicted | block_q=128 |",
        "| 8 | 6.000 ms | 0.750 ms | predicted | block_q=128 |",
    ]


def test_nothing_to_report_is_said_and_nothing_written(tmp_path):
    with pytest.raises(UsageError, match="run `python -m autotune KERNEL` first"):
        write_reports(tmp_path, [], ("md",))
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_leaves_the_old_one(tuned, monkeypatch):
    (path,) = write_reports(tuned, ["toy"], ("md",))["toy"]
    path.write_text("the old one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_reports(tuned, ["toy"], ("md",))
    assert path.read_text() == "the old one"
    assert not list(path.parent.glob(".*"))


def test_a_preset_names_no_study_outside_its_folder(tuned, tmp_path):
    shutil.copytree(tuned, tmp_path / "results")
    (journal, *_) = (tmp_path / "results" / "studies").glob("*.journal")
    shutil.move(journal, tmp_path / "elsewhere.journal")
    for file in (tmp_path / "results").glob("presets/*/toy.json"):
        file.write_text(file.read_text().replace(journal.stem, "../../elsewhere"))
    (path,) = write_reports(tmp_path / "results", [], ("md",))["toy"]
    assert "is not in this results folder" in path.read_text()

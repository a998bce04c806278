"""Accuracy: the statistics, the data that ships, and predictions through the command line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.accuracy import statistics, tables
from autotune.accuracy.plot import write_plot
from autotune.accuracy.run import Prediction, Result, predict_tables
from autotune.accuracy.tables import TABLES, Row, Table
from autotune.cli import main
from autotune.engines._worker import resolve
from autotune.outcome import Outcome, Source, Status

TIMES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=12)


def brute_ranks(values):
    return [1 + sum(other < one for other in values) + (values.count(one) - 1) / 2 for one in values]


@given(TIMES)
def test_spearman_is_the_correlation_of_mean_ranks(pairs):
    a, b = (list(side) for side in zip(*pairs, strict=True))
    found = statistics.spearman(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(brute_ranks(a), brute_ranks(b))[0, 1])


@given(TIMES)
def test_kendall_counts_pairs(pairs):
    counts = {"same": 0, "opposite": 0, "a": 0, "b": 0}
    for (a1, b1), (a2, b2) in itertools.combinations(pairs, 2):
        product = (a1 - a2) * (b1 - b2)
        counts["same"] += product > 0
        counts["opposite"] += product < 0
        counts["a"] += a1 != a2
        counts["b"] += b1 != b2
    found = statistics.kendall(*zip(*pairs, strict=True))
    if not counts["a"] * counts["b"]:
        assert found is None
    else:
        assert found == pytest.approx((counts["same"] - counts["opposite"]) / (counts["a"] * counts["b"]) ** 0.5)


def test_figures_by_hand():
    predicted, measured = [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 5.0]
    assert statistics.spearman(predicted, measured) == pytest.approx(0.8)
    assert statistics.kendall(predicted, measured) == pytest.approx(4 / 6)
    assert statistics.regret(predicted, measured, 1.0, 1) == pytest.approx(100)
    assert statistics.regret(predicted, measured, 1.0, 2) == pytest.approx(0)
    assert statistics.median_ratio(predicted, measured) == pytest.approx(0.9)
    assert statistics.mean_abs_error(predicted, measured) == pytest.approx(100 * (0.5 + 1 + 0 + 0.2) / 4)


def test_ties_in_the_prediction_are_broken_against_it():
    assert statistics.regret([1.0, 1.0, 2.0], [1.0, 3.0, 2.0], 1.0, 1) == pytest.approx(200)


def test_nothing_predicted_gives_no_figures():
    assert statistics.spearman([], []) is None
    assert statistics.kendall([], []) is None
    assert statistics.regret([], [], 1.0, 5) is None
    assert statistics.mean_abs_error([], []) is None
    assert statistics.median_ratio([], []) is None


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_table_parses_and_names_its_source(table):
    repository, _, what = table.source.partition(", ")
    assert repository.count("/") == 1
    assert what
    rows = table.rows()
    assert len(rows) > 3
    assert all(row.measured_ms > 0 for row in rows)
    assert len({row.label for row in rows}) == len(rows)
    assert callable(resolve(f"autotune.accuracy.workloads.{table.workload}"))


def test_only_the_tables_that_were_fitted_on_say_so():
    fitted = {"amleng_matmul_v5e", "amleng_scale_v5e"}
    fitted |= {"tokamax_lce_xla_v7x", "tokamax_attention_xla_v7x", "tokamax_attention_pallas_v7x"}
    assert {name for name, table in TABLES.items() if table.fitted} == fitted


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if not table.name.startswith("jaxbench_pal")])
def test_every_row_can_be_built(name):
    from autotune.chips import get_chip

    table = TABLES[name]
    if not table.installed:
        pytest.skip(f"{table.needs} is not installed")
    build = resolve(f"autotune.accuracy.workloads.{table.workload}")
    for row in table.rows():
        program = build(row.fields, get_chip(table.target))
        assert callable(program.function)
        assert program.arguments


def prediction(measured: float, predicted: float | None, **fields) -> Prediction:
    outcome = (
        Outcome(Status.VMEM_OOM, message="CompileTimeScopedVmemOom:\n too much")
        if predicted is None
        else Outcome(Status.OK, time_ms=predicted, source=Source.SCHEDULE)
    )
    return Prediction(Row(fields, measured), outcome)


def test_a_row_without_a_prediction_is_listed_and_still_counts_for_the_best():
    table = Table("amleng_scale_v5e", "v5e", "elementwise:scale", sweep=True)
    summary = Result(table, [prediction(2.0, 2.0, bm=1), prediction(1.0, None, bm=2)]).summary()
    assert (summary["rows"], summary["predicted"]) == (2, 1)
    assert summary["regret_top1"] == pytest.approx(100)
    assert summary["failures"] == [
        {"row": {"bm": 2}, "status": "vmem_oom", "reason": "vmem_oom: CompileTimeScopedVmemOom: too much"}
    ]


def test_arithmetic_is_no_prediction():
    one = Prediction(Row({}, 1.0), Outcome(Status.OK, time_ms=1.0, source=Source.ANALYTIC, message="not playable"))
    assert one.predicted_ms is None
    assert one.failure == "not playable"


def test_signs_of_changes():
    table = Table("jaxbench_pallas_v6e", "v6e", "jaxbench:pallas", pairs="workload")
    rows = [
        prediction(2.0, 2.5, workload="a", which="before"),
        prediction(1.0, 1.5, workload="a", which="after"),
        prediction(2.0, 1.0, workload="b", which="before"),
        prediction(1.0, 1.5, workload="b", which="after"),
        prediction(2.0, 1.0, workload="c", which="before"),
        prediction(1.0, None, workload="c", which="after"),
        prediction(1.0, 1.0, workload="d", which="same"),
    ]
    assert Result(table, rows).pairs == {"measured": 3, "predicted": 2, "sign_right": 1}


def few(monkeypatch, name: str, **changes) -> Table:
    """Keeps one row of a table, with some of its fields changed."""
    first = TABLES[name].rows()[0]
    row = Row({**first.fields, **changes}, first.measured_ms)
    monkeypatch.setattr(Table, "rows", lambda self: [row])
    return TABLES[name]


@pytest.mark.parametrize("wanted", ["json", "text"])
def test_one_real_prediction_through_the_command_line(wanted, monkeypatch, capfd, tmp_path):
    pytest.importorskip("matplotlib")
    few(monkeypatch, "amleng_scale_v5e")
    picture = tmp_path / "accuracy.png"
    line = ["accuracy", "amleng_scale_v5e", "--jobs", "1", "--rows", "--plot", str(picture)]
    assert main([*line, "--json"] if wanted == "json" else line) == 0
    out, _ = capfd.readouterr()
    if wanted == "json":
        (summary,) = json.loads(out)
        assert (summary["table"], summary["target"], summary["fitted"]) == ("amleng_scale_v5e", "v5e", True)
        assert (summary["rows"], summary["predicted"], summary["failures"]) == (1, 1, [])
        assert summary["spearman"] is None
        assert 0.5 < summary["median_ratio"] < 1.5
    else:
        for word in ("Fitted", "AMLeng/tpu-kernels", "1/1", "bm=2048"):
            assert word in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_row_that_does_not_compile_is_listed_with_its_reason(monkeypatch):
    table = few(monkeypatch, "amleng_scale_v5e", bm=2048, bn=2048)  # refused on the device too
    (result,) = predict_tables([table], jobs=1, timeout_s=120)
    (failure,) = result.summary()["failures"]
    assert failure["status"] == "vmem_oom"
    assert "vmem" in failure["reason"].lower()
    assert failure["row"]["bm"] == 2048


@pytest.mark.parametrize(
    ("line", "wrong", "right"),
    [
        ("accuracy nowhere", "nowhere", "amleng_matmul_v5e"),
        ("accuracy --jobs 0", "0", "a positive integer"),
        ("accuracy --plot nowhere/a.png", "nowhere", "no folder"),
        ("accuracy --plot a.doc", "a.doc", "png"),
    ],
)
def test_bad_usage(line, wrong, right, capfd):
    assert main(line.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert wrong in err
    assert right in err


def test_without_matplotlib_the_extra_is_named(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["accuracy", "--plot", "a.png"]) == 1
    assert "tpu-autotune[plot]" in capfd.readouterr().err


def test_a_picture_of_nothing_is_drawn_all_the_same(tmp_path):
    pytest.importorskip("matplotlib")
    write_plot([Result(TABLES["amleng_scale_v5e"], [prediction(1.0, None)])], tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").stat().st_size


def test_a_table_of_a_package_that_is_not_there(monkeypatch, capfd):
    table = few(monkeypatch, "amleng_scale_v5e")
    absent = dataclasses.replace(table, name="absent", needs="no_such_package")
    monkeypatch.setitem(TABLES, "absent", absent)
    assert absent not in tables.select([], everything=True)
    assert main(["accuracy", "absent"]) == 2
    assert "pip install no_such_package" in capfd.readouterr().err
    monkeypatch.setattr(tables, "_TABLES", (table, absent))
    assert main(["accuracy", "--jobs", "1"]) == 0
    assert "no_such_package is not installed (pip install no_such_package): absent" in " ".join(
        capfd.readouterr().out.split()
    )


def test_selection():
    assert tables.select(["amleng_scale_v5e", "amleng_scale_v5e"]) == [TABLES["amleng_scale_v5e"]]
    assert tables.select([], everything=True) == [table for table in TABLES.values() if table.installed]
    assert [table for table in tables.select([]) if table.slow] == []


@pytest.mark.slow
def test_the_v5e_sweeps_are_predicted_well():
    matmul, scale = (
        result.summary()
        for result in predict_tables([TABLES["amleng_matmul_v5e"], TABLES["amleng_scale_v5e"]], jobs=2, timeout_s=300)
    )
    assert matmul["predicted"] == matmul["rows"] == 63
    assert matmul["spearman"] >= 0.995
    assert matmul["regret_top1"] <= 0.5
    assert matmul["mean_abs_error"] <= 5
    assert scale["predicted"] == scale["rows"] == 24

"""Unit use of a program's regions, counted on small real compiles."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from conftest import ROOT

from autotune.chips import get_chip
from autotune.engines import Task, open_engine
from autotune.engines._pool import WorkerPool
from autotune.engines.compiler import units
from autotune.engines.compiler.support import why_unsupported
from autotune.engines.compiler.units import Region, UnitUse
from autotune.kernel import get_kernel
from autotune.outcome import Outcome

needs_compiler = pytest.mark.skipif(why_unsupported() is not None, reason=why_unsupported() or "")
SIZE = 512


@pytest.fixture(scope="module")
def task():
    kernel = get_kernel("matmul")
    return Task(kernel, kernel.parse_problem(f"m={SIZE},n={SIZE},k={SIZE},dtype=bfloat16"), get_chip("v5e"))


@pytest.fixture(scope="module")
def config(task):
    return task.kernel.space(task.problem, task.chip).parse({"block_m": 256, "block_n": 256, "block_k": 256})


@pytest.fixture(scope="module")
def measured(task, config):
    pool = WorkerPool(1, warm_up="autotune.engines.compiler.toolchain:warm_up", environment=units.environment())
    job = {"kernel": "matmul", "problem": task.problem.to_dict(), "target": task.chip.name, "config": config}
    try:
        found = pool.submit("autotune.engines.compiler.units:measure", job, timeout_s=120).result()
    finally:
        pool.close()
    return Outcome.from_dict(found["outcome"]), units.parse_use(found["use"])


@needs_compiler
def test_counting_leaves_the_prediction_as_it_is(task, config, measured):
    outcome, use = measured
    with open_engine("compiler", task, jobs=1, timeout_s=120) as engine:
        plain = engine.evaluate(config).result()
    assert outcome.time_ms == pytest.approx(plain.time_ms, rel=1e-6)
    cycles = outcome.time_ms * task.chip.clock_ghz * 1e6
    # All cycles are charged to regions; what the time has beyond them is the last write.
    assert sum(region.cycles for region in use.regions) == pytest.approx(use.cycles, rel=1e-6)
    assert 0.9 * cycles < use.cycles <= 1.0001 * cycles


@needs_compiler
def test_every_multiply_is_counted_as_often_as_it_ran(measured):
    _, use = measured
    pushes = (SIZE // 16) * (SIZE // 128) ** 2  # packed rows times columns times depth, in a 128-wide array's units
    multiplying = sum(region.used["MXU"] * region.runs for region in use.regions)
    assert multiplying == 16 * pushes
    hot = max(use.regions, key=lambda region: region.used["MXU"])
    assert hot.runs == (SIZE // 256) ** 3
    assert use.slots["MXU"] == 4
    # Its matrix instructions are at least the multiplies, and all its units stay within their slots.
    assert hot.used["VEX"] >= hot.used["MXU"] / 16
    assert all(0 <= hot.occupancy(unit, use.slots) <= 1 for unit in units.UNITS)


@needs_compiler
def test_loads_and_stores_are_those_of_the_blocks(measured):
    _, use = measured
    hot = max(use.regions, key=lambda region: region.used["MXU"])
    tiles = 2 * 256 * 256 // (16 * 128)  # packed registers of both operands, each loaded once at least
    assert hot.used["VLOAD"] >= tiles
    assert hot.spilled <= hot.used["VLOAD"] + hot.used["VSTORE"]


@needs_compiler
def test_the_course_of_a_region_adds_up(measured):
    _, use = measured
    hot = max(use.regions, key=lambda region: region.used["MXU"])
    assert len(hot.course) == units.PARTS
    for unit in units.UNITS:
        assert sum(part[unit] for part in hot.course) == hot.used[unit]
    assert hot.bundles <= sum(part["cycles"] for part in hot.course) <= hot.cycles / hot.runs


@needs_compiler
def test_the_command_says_what_binds():
    line = [sys.executable, str(ROOT / "benchmarks" / "unit_table.py"), "matmul", "--target", "v5e,v6e"]
    problem = ["--problem", "m=256,n=256,k=256,dtype=bfloat16", "--config", "block_m=128,block_n=128,block_k=128"]
    done = subprocess.run(
        [*line, *problem, "--markdown", "--course"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| MXU multiplying ") == 4  # two tables for each target
    assert "cannot take fewer than" in done.stdout
    assert done.stdout.count("not measured") == 2


def test_occupancy_is_of_the_slots_in_all_cycles():
    region = Region("op", 0, bundles=10, runs=4, cycles=80.0, used={"VALU": 40}, spilled=0)
    assert region.occupancy("VALU", {"VALU": 4}) == 0.5  # 160 operations, 320 slots
    use = UnitUse({"VALU": 4}, 80.0, [region])
    assert units.parse_use({"slots": use.slots, "cycles": use.cycles, "regions": [dataclasses.asdict(region)]}) == use


def test_libtpus_table_is_read(tmp_path):
    text = "== CAPACTIY:\nMXU, XLU, VALU\n    4     3     4\n== UTILIZATION:\n0 0 1\n4 0 2\n"
    (tmp_path / "17-matmul.1-00-final_hlo-static-per-bundle-utilization.txt").write_text(text)
    (tmp_path / "17-matmul.1-02-final_bundles.txt").write_text("no table")
    tables = units.read_tables(tmp_path)
    assert tables["matmul.1"].slots == {"MXU": 4, "XLU": 3, "VALU": 4}
    assert [row["VALU"] for row in tables["matmul.1"].rows] == [1, 2]

"""The compiler engine with the real TPU compiler: times, refusals, and workers that die."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from rough_kernels import RoughKernel, RoughProblem

from autotune.chips import CHIPS, get_chip
from autotune.engines import Task, open_engine
from autotune.engines._pool import WorkerDied, WorkerPool
from autotune.engines.compiler.support import why_unsupported
from autotune.errors import UnavailableError, UsageError
from autotune.kernel import get_kernel
from autotune.outcome import Source, Status

needs_compiler = pytest.mark.skipif(why_unsupported() is not None, reason=why_unsupported() or "")
pytestmark = needs_compiler


def matmul_task(target: str, **fields):
    kernel = get_kernel("matmul")
    problem = kernel.problems[kernel.default_problem].replace(fields)
    return Task(kernel, problem, get_chip(target))


def blocks(task, block_m, block_n, block_k):
    space = task.kernel.space(task.problem, task.chip)
    return space.parse({"block_m": block_m, "block_n": block_n, "block_k": block_k})


@pytest.fixture(scope="module")
def rough():
    task = Task(RoughKernel(), RoughProblem(n=2048), get_chip("v5e"))
    with open_engine("compiler", task, jobs=2, timeout_s=60) as engine:
        yield engine


@pytest.mark.parametrize("target", list(CHIPS))
def test_every_target_gives_a_schedule_near_the_roofline(target):
    task = matmul_task(target, m=4096, n=4096, k=4096, dtype="bfloat16")
    with open_engine("compiler", task, jobs=1, timeout_s=120) as engine:
        large = engine.evaluate(blocks(task, 1024, 1024, 512)).result()
        small = engine.evaluate(blocks(task, 128, 128, 128)).result()
    assert large.status is Status.OK, large.message
    assert large.source is Source.SCHEDULE, large.message
    assert not large.measured
    roofline = task.kernel.cost(task.problem).roofline_ms(task.chip)
    slower = 2.2 / 1.9 if target == "v7x" else 1  # its peak is that of a clock at which no program runs
    assert roofline <= large.compute_ms <= 1.3 * slower * roofline
    assert max(large.compute_ms, large.memory_ms) <= large.time_ms
    assert small.time_ms > 3 * large.time_ms
    assert large.provenance["target"] == target


@pytest.mark.parametrize("target", list(CHIPS))
def test_every_target_plays_all_tiles_of_a_causal_kernel(target):
    """Loops within a grid step, with bounds that depend on it: every generation's branches are followed."""
    kernel, chip = get_kernel("attention"), get_chip(target)
    problem = kernel.parse_problem("heads=2,kv_heads=2,q_len=2048,kv_len=2048")
    space = kernel.space(problem, chip)
    config = space.parse({"block_q": 1024, "block_kv": 1024, "block_q_compute": 512, "block_kv_compute": 512})
    with open_engine("compiler", Task(kernel, problem, chip), jobs=1, timeout_s=120) as engine:
        outcome = engine.evaluate(config).result()
    assert outcome.source is Source.SCHEDULE, outcome.message
    # 10 of 16 tiles a head hold 8.5 tiles' worth of useful scores; the units overlap, but never fully.
    roofline = kernel.cost(problem).roofline_ms(chip)
    assert 10 / 8.5 * roofline < outcome.compute_ms < 8 * roofline


def test_a_large_program_whose_kernel_is_called_not_inlined_is_played():
    task = matmul_task("v5e", m=8192, n=131072, k=16384, dtype="bfloat16")
    with open_engine("compiler", task, jobs=1, timeout_s=120) as engine:
        outcome = engine.evaluate(blocks(task, 1024, 1024, 512)).result()
    assert outcome.source is Source.SCHEDULE, outcome.message
    assert outcome.time_ms > task.kernel.cost(task.problem).roofline_ms(task.chip)


def test_equal_ops_share_the_listing_that_the_compiler_writes_once():
    kernel, chip = get_kernel("attention"), get_chip("v5e")
    problem = kernel.parse_problem("heads=2,kv_heads=2,q_len=512,kv_len=512,head_dim=64")
    with open_engine("compiler", Task(kernel, problem, chip), jobs=1, timeout_s=120) as engine:
        outcome = engine.evaluate(kernel.baselines(problem, chip)["default"]).result()
    assert outcome.source is Source.SCHEDULE, outcome.message


def test_cancelling_gives_up_the_work():
    task = Task(RoughKernel(), RoughProblem(), get_chip("v5e"))
    with open_engine("compiler", task, jobs=1, timeout_s=600) as engine:
        hung, queued = engine.evaluate({"deed": "hang"}), engine.evaluate({"deed": "hang"})
        time.sleep(2)
        started = time.monotonic()
        assert hung.cancel()
        assert queued.cancel()
        assert engine.evaluate({"deed": "work"}).result().ok
        assert time.monotonic() - started < 30


def test_traffic_is_exactly_what_the_grid_fetches():
    task = matmul_task("v5e", m=2048, n=1024, k=1536, dtype="bfloat16")
    with open_engine("compiler", task, jobs=1, timeout_s=120) as engine:
        outcome = engine.evaluate(blocks(task, 512, 256, 512)).result()
    grid_m, grid_n = 2048 // 512, 1024 // 256
    x_bytes, y_bytes, out_bytes = 2048 * 1536 * 2, 1536 * 1024 * 2, 2048 * 1024 * 2
    assert outcome.hbm_bytes == x_bytes * grid_n + y_bytes * grid_m + out_bytes


def test_the_xla_baseline_is_predicted_by_the_same_rules():
    task = matmul_task("v5e", m=8192, n=8192, k=8192, dtype="bfloat16")
    with open_engine("compiler", task, jobs=1, timeout_s=120) as engine:
        outcome = engine.evaluate_reference().result()
    assert outcome.source is Source.SCHEDULE
    # The Pallas tutorial's printed time for XLA on a v5e, dispatch included, is 6.05 ms.
    assert outcome.time_ms == pytest.approx(6.05, rel=0.06)


@pytest.mark.parametrize(
    ("deed", "status", "words"),
    [
        ("work", Status.OK, ""),
        ("raise", Status.LOWERING_ERROR, "never works"),
        ("unlowerable", Status.LOWERING_ERROR, "sort"),
        ("vmem", Status.VMEM_OOM, "vmem"),
        ("hbm", Status.HBM_OOM, "HBM"),
        ("kill", Status.CRASH, "SIGKILL"),
        ("abort", Status.CRASH, "SIGABRT"),
    ],
)
def test_whatever_a_config_does_has_a_type(rough, deed, status, words):
    outcome = rough.evaluate({"deed": deed}).result()
    assert outcome.status is status, outcome.message
    assert words in outcome.message
    assert (outcome.time_ms is not None) == (status is Status.OK)


def test_blocks_that_a_table_in_scalar_memory_chooses_are_fetched_as_it_says(rough):
    outcome = rough.evaluate({"deed": "table"}).result()
    assert outcome.source is Source.SCHEDULE, outcome.message
    n = 2048
    block = 128 * n * 4
    # Every block of the first half is taken twice in a row, and so fetched once; all are written.
    traffic = n // 128 // 2 * block + n // 128 * block
    assert traffic <= outcome.hbm_bytes <= traffic + 4096  # and the table itself


def test_a_schedule_that_depends_on_data_is_said_to_be_analytic(rough):
    outcome = rough.evaluate({"deed": "loop_on_data"}).result()
    assert outcome.status is Status.OK
    assert outcome.source is Source.ANALYTIC
    assert "only a run would load" in outcome.message


def test_a_hang_costs_its_own_trial_and_no_more_than_the_limit():
    task = Task(RoughKernel(), RoughProblem(), get_chip("v5e"))
    with open_engine("compiler", task, jobs=1, timeout_s=60) as engine:
        assert engine.evaluate({"deed": "work"}).result().ok  # the worker is warm
        engine.timeout_s = 3
        started = time.monotonic()
        hung = engine.evaluate({"deed": "hang"}).result()
        assert hung.status is Status.TIMEOUT
        assert time.monotonic() - started < 4
        engine.timeout_s = 60
        assert engine.evaluate({"deed": "work"}).result().ok


def test_closing_ends_every_process_at_once():
    task = Task(RoughKernel(), RoughProblem(), get_chip("v5e"))
    engine = open_engine("compiler", task, jobs=2, timeout_s=600)
    pending = [engine.evaluate({"deed": "hang"}) for _ in range(4)]
    time.sleep(2)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert {future.result(timeout=5).status for future in pending} == {Status.CRASH}


def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    script = (
        "import sys, time\n"
        "from autotune.engines._pool import WorkerPool\n"
        "pool = WorkerPool(1, warm_up='os:getpid', environment={})\n"
        "print(pool.start().result(), flush=True)\n"
        "pool.submit('time:sleep', {}, timeout_s=600)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and os.path.exists(f"/proc/{worker}"):
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{worker}")


def test_what_a_job_started_ends_with_a_parent_that_was_killed():
    script = (
        "import sys, time\n"
        "from autotune.engines._pool import WorkerPool\n"
        "pool = WorkerPool(1, warm_up='os:getpid', environment={})\n"
        "print(pool.submit('os:system', {'command': 'sleep 60 & echo $! >pid'}, timeout_s=60).result())\n"
        "(file,) = pool._scratch.glob('*/pid')\n"
        "print(file.read_text(), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "0\n"
    child = int(parent.stdout.readline())
    assert os.path.exists(f"/proc/{child}")
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _is_alive(child):
        time.sleep(0.1)
    assert not _is_alive(child)


def _is_alive(pid: int) -> bool:
    """A zombie is not: whoever inherits it may take its time."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_pool_runs_jobs_in_separate_processes():
    pool = WorkerPool(2, warm_up="os:getpid", environment={})
    try:
        pids = {pool.submit("os:getpid", {}, timeout_s=30).result() for _ in range(4)}
    finally:
        pool.close()
    assert os.getpid() not in pids


def test_where_libtpu_does_not_load_the_ranking_is_analytic_and_says_so(monkeypatch, tmp_path):
    broken = tmp_path / "libtpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(broken))
    task = matmul_task("v5e", m=512, n=512, k=512, dtype="bfloat16")
    with open_engine("auto", task, jobs=1, timeout_s=60) as engine:
        assert engine.name == "analytic"  # its times must not be taken for a compiler's
        assert "no TPU compiler" in engine.notice
        assert "\n" not in engine.notice
        config = blocks(task, 256, 256, 256)
        outcome = engine.evaluate(config).result()
        assert outcome.source is Source.ANALYTIC
        assert engine.validate(config).result().ok
    with pytest.raises(UnavailableError, match="no TPU compiler: libtpu does not work here"):
        open_engine("compiler", task, jobs=1, timeout_s=60)


def test_an_environment_that_xla_refuses_shows_before_any_trial(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag=1")
    task = Task(RoughKernel(), RoughProblem(), get_chip("v5e"))
    with pytest.raises(UnavailableError, match="no_such_flag") as caught:
        open_engine("compiler", task, jobs=1, timeout_s=60)
    assert "\n" not in str(caught.value)


def test_how_a_worker_ended_is_told(tmp_path):
    pool = WorkerPool(1, warm_up="os:getpid", environment={})
    try:
        with pytest.raises(WorkerDied, match="ended with exit code 7"):
            pool.submit("os:_exit", {"status": 7}, timeout_s=30).result()
        assert pool.submit("os:getpid", {}, timeout_s=30).result()
    finally:
        pool.close()


def test_what_a_killed_tuner_left_behind_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale, running = tmp_path / f"autotune-{gone.pid}-x", tmp_path / f"autotune-{os.getpid()}-x"
    stale.mkdir()
    running.mkdir()
    WorkerPool(1, warm_up="os:getpid", environment={}).close()
    assert not stale.exists()
    assert running.exists()


def test_on_other_machines_the_reason_is_one_line(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert "Linux on x86-64" in why_unsupported()


def test_engines_that_are_not_there_are_named():
    task = Task(RoughKernel(), RoughProblem(), get_chip("v5e"))
    with pytest.raises(UsageError, match="auto, compiler or device"):
        open_engine("gpu", task, jobs=1, timeout_s=1)
    with pytest.raises(UsageError, match=r"the attached device is .*, not TPU v5 lite"):
        open_engine("device", task, jobs=1, timeout_s=1)

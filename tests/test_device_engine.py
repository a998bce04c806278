"""The device engine on this machine's CPU, with real processes that hang, die and corrupt memory."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from device_kernels import DeedKernel, DeedProblem, TakingKernel

from autotune.chips import get_chip
from autotune.engines import Task, choose, open_engine
from autotune.engines.device import hardware
from autotune.engines.device.engine import DeviceEngine
from autotune.errors import UnavailableError, UsageError
from autotune.kernel import get_kernel, kernel_names
from autotune.outcome import Source, Status
from autotune.search import SearchSettings
from autotune.tuner import tune

pytestmark = pytest.mark.skipif(hardware.tpu_chips() > 0, reason="these deeds are done to a CPU's memory")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(DeedKernel(), DeedProblem(), get_chip("cpu"))


@pytest.fixture(scope="module")
def engine(task, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        # A run of the user's own may have the CPU meanwhile: the lock is then in another folder.
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("lock")))
        with open_engine("device", task, jobs=4, timeout_s=30) as engine:
            yield engine


def test_what_it_measures_is_the_time_it_takes(engine):
    outcome = engine.evaluate({"deed": "slow"}).result()
    assert outcome.status is Status.OK
    assert outcome.measured
    assert outcome.source is Source.DEVICE
    assert 20 <= outcome.time_ms < 30  # it sleeps for 20 ms
    low, high = outcome.interval_ms
    assert low <= outcome.time_ms <= high
    assert outcome.repeats >= 7
    assert outcome.timer == "wall clock"
    assert outcome.latency_ms >= 20
    assert outcome.first_call_ms >= outcome.latency_ms
    assert outcome.compile_s > 0
    assert outcome.run_s > outcome.repeats * 0.02
    assert outcome.peak_bytes == 2 * 256 * 256 * 4  # its argument and its result
    assert outcome.provenance["device_kind"] == "cpu"


def test_short_calls_are_timed_many_at_once(engine):
    outcome = engine.evaluate({"deed": "work"}).result()
    assert outcome.time_ms < 2
    assert outcome.repeats >= 7


def test_the_reference_is_measured_alike(engine):
    outcome = engine.evaluate_reference().result()
    assert outcome.measured
    assert outcome.time_ms < 2


@pytest.mark.parametrize(
    ("deed", "status", "words"),
    [
        ("abort", Status.CRASH, "run: the worker process ended by SIGABRT"),
        ("too_large", Status.HBM_OOM, "the program takes 32768.00 GiB"),
        ("exhaust", Status.HBM_OOM, "RESOURCE_EXHAUSTED"),
        ("unlowerable", Status.LOWERING_ERROR, "never works"),
    ],
)
def test_what_a_run_comes_to_has_a_type_and_the_next_one_runs(engine, deed, status, words):
    outcome = engine.evaluate({"deed": deed}).result()
    assert outcome.status is status, outcome.message
    assert words in outcome.message
    assert outcome.time_ms is None
    assert engine.evaluate({"deed": "xla"}).result().ok


def test_a_hang_costs_no_more_than_the_limit(engine):
    assert engine.evaluate({"deed": "work"}).result().ok  # the worker is warm
    engine.timeout_s = 3
    try:
        started = time.monotonic()
        outcome = engine.evaluate({"deed": "hang"}).result()
        seconds = time.monotonic() - started
    finally:
        engine.timeout_s = 30
    assert outcome.status is Status.TIMEOUT
    assert outcome.message == "run: no result within 3 s"
    assert 3 <= seconds < 4
    assert engine.evaluate({"deed": "work"}).result().ok


@pytest.mark.parametrize(
    ("deed", "status", "words"),
    [
        ("work", Status.OK, ""),
        ("xla", Status.OK, ""),
        ("nothing", Status.WRONG_RESULT, "65536 of 65536 elements are NaN"),
        ("partly", Status.WRONG_RESULT, "256 of 65536 elements are NaN or infinite, the first at (255, 0)"),
        ("stale", Status.WRONG_RESULT, "relative error"),
        ("once", Status.WRONG_RESULT, "a second run on the same inputs gave another result"),
        ("wobble", Status.WRONG_RESULT, "a second run on the same inputs gave another result"),
        ("overwrite", Status.WRONG_RESULT, "it overwrote its argument 0"),
        ("abort", Status.CRASH, "check: the worker process ended by SIGABRT"),
    ],
)
def test_validation_on_the_device_sees_what_memory_shows(engine, deed, status, words):
    validation = engine.validate({"deed": deed}).result()
    assert validation.status is status, validation.message
    assert words in validation.message
    if validation.ok:
        assert validation.problems[-1] == "n=256,dtype=float32 on the device"


def test_inputs_that_a_kernel_overwrote_are_restored_for_the_next(engine):
    """`overwrite` changes what all programs share; a kernel that is right must still be found right."""
    assert engine.evaluate({"deed": "overwrite"}).result().ok
    race = engine.race([{"deed": "overwrite"}, {"deed": "work"}, None], seconds=0.1, seed=0).result()
    assert race.ok
    assert engine.validate({"deed": "work"}).result().ok


def test_a_kernel_that_takes_its_arguments_gets_copies(monkeypatch, tmp_path):
    """Donated: the array is gone after a call, and is right for the next one all the same."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    task = Task(TakingKernel(), DeedProblem(), get_chip("cpu"))
    with open_engine("device", task, jobs=1, timeout_s=30) as engine:
        outcome = engine.evaluate({"deed": "xla"}).result()
        assert outcome.ok, outcome.message
        assert outcome.repeats >= 7
        verdict = engine.validate({"deed": "xla"}).result()
        assert verdict.ok, verdict.message


def test_a_race_times_all_in_turn(engine):
    race = engine.race([{"deed": "slow"}, {"deed": "xla"}, None], seconds=0.5, seed=1).result()
    assert race.ok
    slow, fast, reference = race.samples
    assert len(slow) == len(fast) == len(reference) >= 5
    assert min(slow) >= 20 > max(fast)


def test_a_race_that_hangs_or_cannot_begin_says_so(engine):
    engine.timeout_s = 2
    try:
        race = engine.race([{"deed": "work"}, {"deed": "hang"}], seconds=0.1, seed=1, fresh=True).result()
    finally:
        engine.timeout_s = 30
    assert race.status is Status.TIMEOUT
    assert race.message == "race: no result within 4 s"
    race = engine.race([{"deed": "unlowerable"}], seconds=0.1, seed=1).result()
    assert race.status is Status.LOWERING_ERROR


def test_two_runs_do_not_measure_at_once(engine, task):
    with pytest.raises(UnavailableError, match="another run is measuring on this machine's device"):
        open_engine("device", task, jobs=1, timeout_s=10)


@pytest.mark.slow
def test_a_run_over_all_of_them_goes_on_and_keeps_one_that_is_right(engine, task, tmp_path):
    engine.timeout_s = 5
    try:
        result = tune(task, engine, SearchSettings(trials=30, results=tmp_path))
    finally:
        engine.timeout_s = 30
    assert result.best is not None
    assert result.best.config["deed"] in ("work", "xla", "confine")
    assert result.best.validation.ok
    assert result.best.outcome.measured
    assert result.gain  # the baseline sleeps
    assert result.counts["timeout"] == 1
    assert result.counts["crash"] == 1
    assert result.counts["hbm_oom"] == 2
    assert sum(result.counts.values()) == 15
    assert not {record.config["deed"] for record in result.rejected} & {"work", "xla"}


def test_a_target_that_is_not_attached_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="--target v6e: the attached device is cpu"):
        choose("device", "v6e")
    with pytest.raises(UsageError, match="--target cpu: nothing is compiled for it"):
        choose("compiler", "cpu")
    assert choose("device", "cpu")[0] == "device"
    assert choose("auto", None) == ("auto", get_chip("v5e"))
    monkeypatch.setattr(hardware, "tpu_chips", lambda: 4)
    monkeypatch.setattr(hardware, "attached", lambda: hardware.Attached("tpu", "TPU v6 lite", 4))
    assert choose("auto", None) == ("device", get_chip("v6e"))
    assert choose("auto", "v6e") == ("device", get_chip("v6e"))
    assert choose("auto", "v5p") == ("auto", get_chip("v5p"))
    assert choose("compiler", None) == ("compiler", get_chip("v5e"))

    def unavailable():
        raise UnavailableError("another program has it")

    monkeypatch.setattr(hardware, "attached", unavailable)
    assert choose("auto", "v5p") == ("auto", get_chip("v5p"))
    for name, target in (("auto", None), ("device", "v6e")):
        with pytest.raises(UnavailableError, match="another program"):
            choose(name, target)


def test_a_kernel_for_tpus_is_refused_on_a_cpu():
    kernel = get_kernel("matmul")
    task = Task(kernel, kernel.problems[kernel.default_problem], get_chip("cpu"))
    with pytest.raises(UsageError, match="matmul runs on tpu, not on a cpu"):
        open_engine("device", task, jobs=1, timeout_s=1)


def test_a_platform_that_jax_has_not_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # Its lock is another.
    monkeypatch.setenv("JAX_PLATFORMS", "no_such")
    hardware.attached.cache_clear()
    with pytest.raises(UnavailableError, match="no device can be opened") as caught:
        hardware.attached()
    assert "\n" not in str(caught.value)
    assert "no_such" in str(caught.value)


def test_tpus_are_counted_on_the_bus(tmp_path: Path, monkeypatch):
    cards = [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x0063")]
    for name, (vendor, device) in zip("abcd", cards, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    monkeypatch.setattr(hardware, "_PCI", tmp_path)
    assert hardware.tpu_chips() == 2
    own = hardware.own_environments(2)
    assert [environment["TPU_VISIBLE_CHIPS"] for environment in own] == ["0", "1"]
    assert len({environment["TPU_PROCESS_PORT"] for environment in own}) == 2


def test_each_worker_has_an_environment_of_its_own():
    from autotune.engines._pool import WorkerPool

    pool = WorkerPool(
        2, warm_up="os:getpid", environment={}, own=[{"TPU_VISIBLE_CHIPS": "0"}, {"TPU_VISIBLE_CHIPS": "1"}]
    )
    try:
        jobs = [pool.submit("device_kernels:chip_after_a_while", {}, timeout_s=30) for _ in range(2)]
        assert {job.result() for job in jobs} == {"0", "1"}
    finally:
        pool.close()


def test_jobs_of_one_submission_share_a_worker_however_large_it_grew():
    from autotune.engines._pool import Job, WorkerPool

    pool = WorkerPool(1, warm_up="os:getpid", environment={}, recycle_bytes=1)
    try:
        jobs = [Job("os:getpid", {}, 30)] * 2
        first, second = (pool.submit_all(jobs).result() for _ in range(2))
    finally:
        pool.close()
    assert first[0] == first[1] != second[0] == second[1]


def test_a_job_that_forks_answers_once():
    from autotune.engines._pool import WorkerPool

    pool = WorkerPool(1, warm_up="os:getpid", environment={})
    try:
        assert pool.submit("os:fork", {}, timeout_s=30).result() > 0
        time.sleep(0.3)  # What the child says would be there by now.
        assert pool.submit("os:getcwd", {}, timeout_s=30).result().startswith("/")
        assert pool.submit("os:getcwd", {}, timeout_s=30).result().startswith("/")
    finally:
        pool.close()


def test_a_worker_that_cannot_start_is_not_the_jobs_fault():
    from autotune.engines._pool import WorkerDied, WorkerPool

    pool = WorkerPool(1, warm_up="os:chdir", environment={})
    try:
        with pytest.raises(WorkerDied, match="no worker can be started: TypeError"):
            pool.submit("os:getpid", {}, timeout_s=30).result()
    finally:
        pool.close()


def test_a_job_that_is_given_up_while_its_worker_starts_is_not_run():
    from autotune.engines._pool import WorkerDied, WorkerPool

    slow = {"TPU_VISIBLE_CHIPS": "0"}
    pool = WorkerPool(1, warm_up="device_kernels:chip_after_a_while", environment=slow)
    try:
        job = pool.submit("os:getpid", {}, timeout_s=30)
        while not job.running():
            time.sleep(0.01)
        pool.give_up(job)
        with pytest.raises(WorkerDied, match="given up"):
            job.result()
        assert pool.submit("os:getpid", {}, timeout_s=30).result()
    finally:
        pool.close()


def test_a_kernel_that_is_not_registered_is_made_once_in_a_worker():
    from autotune.engines._jobs import open_kernel

    known, _ = open_kernel("device_kernels:DeedKernel", {"n": 256, "dtype": "float32"})
    again, _ = open_kernel("device_kernels:DeedKernel", {"n": 16, "dtype": "float32"})
    assert known is again


def test_what_a_kernel_has_overwritten_is_made_again(task):
    from autotune.engines.device.programs import InputSets, fingerprint

    inputs = InputSets(lambda number: task.kernel.make_inputs(task.problem, number), 0, 1 << 18)
    known = [fingerprint(arrays) for arrays in inputs.sets]
    assert len(set(known)) == len(known) == 4
    assert not inputs.restore()
    inputs.sets[1] = (inputs.sets[1][0].at[3, 3].set(99.0),)
    assert inputs.restore()
    assert [fingerprint(arrays) for arrays in inputs.sets] == known


@pytest.mark.parametrize(("mib", "sets"), [(1, 4), (100, 3), (255, 2), (256, 1), (4096, 1)])
def test_inputs_larger_than_caches_are_not_held_twice(mib, sets):
    from autotune.engines.device.programs import InputSets

    inputs = InputSets(lambda number: (np.zeros(1, np.float32),), 0, mib << 20)
    assert len(inputs.sets) == sets


def test_a_race_compiles_nothing_anew_and_one_seeds_inputs_are_held(task):
    from autotune.engines.device import programs

    config = {"deed": "xla"}
    tried, raced = (programs.load(task.kernel, task.problem, config, seed) for seed in (0, 1000))
    try:
        assert tried.call is raced.call
        assert tried.inputs is not raced.inputs
        assert raced.inputs is programs.load(task.kernel, task.problem, None, 1000).inputs
        assert list(programs._inputs.values()) == [raced.inputs]
    finally:
        programs.forget_programs()
    assert not programs._programs


def test_inputs_are_placed_as_the_program_wants_them():
    """Sharded over a mesh here; what was made for one device is moved before the clock starts."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from autotune.engines.device.programs import load

    sharding = NamedSharding(Mesh(jax.devices()[:1], ("x",)), PartitionSpec("x"))

    class ShardedKernel(DeedKernel):
        name = "sharded"

        def bind(self, problem, config, *, interpret=False):
            return jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, sharding), in_shardings=sharding)

    program = load(ShardedKernel(), DeedProblem(n=128), {"deed": "xla"}, 0)
    assert [array.format for array in program.next_arguments()] == list(program.formats)


def test_an_argument_that_a_program_does_not_read_is_given_all_the_same():
    from autotune.engines.device.programs import load

    class HalfReadKernel(DeedKernel):
        name = "half_read"

        def arguments(self, problem):
            return 2 * super().arguments(problem)

        def bind(self, problem, config, *, interpret=False):
            return lambda x, unread: 2 * x

    program = load(HalfReadKernel(), DeedProblem(n=128), {"deed": "xla"}, 0)
    x, unread = program.next_arguments()
    np.testing.assert_array_equal(program.call(x, unread), 2 * np.asarray(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", kernel_names())
def test_the_xla_side_of_every_kernel_is_measured_here(name, monkeypatch, tmp_path):
    """Pallas kernels need a TPU; what they are compared with runs anywhere, on the inputs they would get."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kernel, chip = get_kernel(name), get_chip("v5e")
    if name == "tokamax_attention":
        pytest.importorskip("tokamax", reason="tokamax is not installed")
    problem = kernel.problems[kernel.default_problem]
    small = kernel.validation_problems(problem, kernel.baselines(problem, chip)["default"])[0]
    device = hardware.Attached("cpu", "cpu", 1)
    with DeviceEngine(Task(kernel, small, device.chip), device, jobs=1, timeout_s=120) as engine:
        outcome = engine.evaluate_reference().result()
        assert outcome.ok, outcome.message
        assert outcome.measured
        race = engine.race([None, None], seconds=0.1, seed=5).result()
        assert race.ok, race.message
        if "cpu" not in kernel.platforms:
            refused = engine.evaluate(kernel.baselines(problem, chip)["default"]).result()
            assert refused.status is Status.LOWERING_ERROR
            assert "interpret mode" in refused.message

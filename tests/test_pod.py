"""Two real processes that measure together under `jax.distributed`, and what becomes of one when the other fails."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.engines.device import hardware
from autotune.engines.device.pod import Place
from autotune.errors import UsageError
from tests.conftest import ROOT

on_a_cpu = pytest.mark.skipif(hardware.tpu_chips() > 0, reason="the deeds are done on a CPU")


@pytest.mark.parametrize(
    ("given", "environment", "place"),
    [
        ((None, None, None), {}, None),
        ((None, None, None), {"JAX_NUM_PROCESSES": "4"}, None),
        (("a:1", 2, 1), {}, Place("a", 1, 2, 1)),
        ((None, None, 0), {"JAX_COORDINATOR_ADDRESS": "h:80", "JAX_NUM_PROCESSES": "3"}, Place("h", 80, 3, 0)),
        (("auto", None, None), {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}, Place("t0", 8470, 2, 1)),
        (("auto", None, None), {"TPU_WORKER_HOSTNAMES": "t0", "TPU_WORKER_ID": "0"}, None),
    ],
)
def test_which_process_this_is(given, environment, place):
    assert Place.find(*given, environment) == place


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("a:1", None, None), "--num-processes, --process-id lacks"),
        (("a:1", 2, 2), "must be from 0 to 1"),
        (("a:1", 1, 0), "must be 2 or more"),
        (("a", 2, 0), "must be HOST:PORT"),
        (("a:x", 2, 0), "must be HOST:PORT"),
        (("auto", None, None), "TPU_WORKER_HOSTNAMES"),
    ],
)
def test_half_said_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        Place.find(*given, {})


class TwoProcesses:
    """Process 1 first, then process 0: either may come first."""

    def __init__(self, folder: Path, *deeds: str, timeout_s: float = 10) -> None:
        with socket.create_server(("", 0)) as listener:
            port = str(listener.getsockname()[1])
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(folder)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.pod_child", str(number), port, str(timeout_s), *deeds],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in (1, 0)
        ][::-1]

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self.processes:
            process.kill()
            process.communicate()

    def outcome(self) -> dict:
        """The next one of process 0."""
        return json.loads(self.processes[0].stdout.readline())

    def end(self, number: int, limit_s: float) -> tuple[int, str]:
        """How that process ends, and its last words."""
        out, _ = self.processes[number].communicate(timeout=limit_s)
        return self.processes[number].returncode, out


@on_a_cpu
def test_all_run_the_same_config_in_step_and_the_slowest_counts(tmp_path):
    with TwoProcesses(tmp_path, "work", "slow", "raise") as pod:
        quick, slow, raised = pod.outcome(), pod.outcome(), pod.outcome()
        assert quick["status"] == slow["status"] == "ok"
        assert quick["provenance"]["processes"] == "2"
        assert quick["time_ms"] < 50 < slow["time_ms"]  # process 1 alone sleeps for 50 ms
        assert raised["status"] == "lowering_error"
        assert "process 1" in raised["message"]
        assert "this process cannot" in raised["message"]
        assert pod.end(0, 30)[0] == 0
        assert pod.end(1, 30) == (0, "process 0 has finished\n")


@on_a_cpu
@pytest.mark.slow
def test_a_process_that_fails_costs_one_trial(tmp_path):
    """It dies or hangs while it runs or compiles, or has another program: the next trial finds all well."""
    wrong = {
        "abort": ("crash", "process 1.*SIGABRT"),
        "hang": ("timeout", "run: no result within 10 s"),
        "other_program": ("lowering_error", "process 1.*lowered another program"),
        "hang_compiling": ("timeout", "process 1.*compile: no result within 10 s"),
    }
    with TwoProcesses(tmp_path, *(deed for one in wrong for deed in (one, "work"))) as pod:
        for status, words in wrong.values():
            outcome = pod.outcome()
            assert outcome["status"] == status
            assert re.search(words, outcome["message"]), outcome["message"]
            assert pod.outcome()["status"] == "ok"


@on_a_cpu
@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_leaves_no_one_waiting(killed, tmp_path):
    with TwoProcesses(tmp_path, "work", "hang", "work", timeout_s=100) as pod:
        assert pod.outcome()["status"] == "ok"
        time.sleep(2)  # they hang together now
        pod.processes[killed].send_signal(signal.SIGKILL)
        code, words = pod.end(1 - killed, 30)
        assert code == 1
        assert f"process {killed}" in words
        assert "is gone" in words
        assert "start all processes again" in words


@on_a_cpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_line_tunes_a_step_over_two_processes(tmp_path):
    with socket.create_server(("", 0)) as listener:
        address = f"localhost:{listener.getsockname()[1]}"
    problem = "tiny-cpu,topology=cpu:2,batch=2,seq_len=32"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)}
    environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-m", "autotune", "train_step", "--problem", problem, "--engine", "device"]
    command += ["--trials", "2", "--json"]
    processes = []
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, "JAX_PROCESS_ID": str(number), "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    (out, err), (follower_out, follower_err) = (process.communicate(timeout=800) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], err + follower_err
    result = json.loads(out)
    assert result["engine"] == "device"
    assert result["trials"] == {"ok": 2}
    assert result["best"]["validated"]
    preset = json.loads((tmp_path / "0/results/presets/cpu/train_step.json").read_text())[0]
    assert preset["source"] == "measured"
    assert "process 0 has finished" in follower_err
    assert follower_out == ""
    assert not (tmp_path / "1/results").exists()  # process 0 alone keeps anything

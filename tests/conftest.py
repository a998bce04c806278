"""What several test modules share: the toy kernel, registered as a third party's package would register it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from autotune import engines, kernel
from tests.fakes import FakeEngine

ROOT = Path(__file__).resolve().parent.parent

# Most of the time of tests of numerics is XLA's, for the CPU; code that runs once need not be fast. The processes
# that measure or compile for a TPU are children, which do not see this.
jax.config.update("jax_disable_most_optimizations", True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Slow tests end where their time does: ``SLOW_TESTS_UNTIL``, in seconds since 1970, is set by ``.ci/run``."""
    until = os.environ.get("SLOW_TESTS_UNTIL")
    if until and item.get_closest_marker("slow") and time.time() > float(until):
        pytest.skip("NOT RUN: out of time (SLOW_TESTS_UNTIL)")


@pytest.fixture(scope="session")
def toy_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on the import path, is an installed distribution with the kernel ``toy``."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "toy_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[autotune.kernels]\ntoy = tests.fakes:ToyKernel\n")
    return folder


@pytest.fixture
def toy_registered(toy_package: Path, monkeypatch: pytest.MonkeyPatch):
    """The toy kernel registered in this process."""
    monkeypatch.syspath_prepend(str(toy_package))
    kernel.get_kernel.cache_clear()
    kernel.kernel_names.cache_clear()
    yield
    kernel.get_kernel.cache_clear()
    kernel.kernel_names.cache_clear()


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeEngine]]:
    """Makes the command line open fake engines; returns the list of those it opened."""

    def install(**behaviour) -> list[FakeEngine]:
        opened: list[FakeEngine] = []

        def open_engine(name, task, *, jobs, timeout_s, pod=None):
            opened.append(FakeEngine(task, jobs=jobs, timeout_s=timeout_s, **behaviour))
            return opened[-1]

        monkeypatch.setattr(engines, "open_engine", open_engine, raising=False)
        return opened

    return install


@pytest.fixture
def command(toy_package: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``python -m autotune …`` in an empty folder of its own."""
    work = tmp_path / "work"
    work.mkdir()

    def start(line: list[str], path: Path) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(path), str(toy_package), str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            line,
            cwd=work,
            env={**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def run(*arguments: str, path: Path = toy_package) -> subprocess.CompletedProcess[str]:
        return start([sys.executable, "-m", "autotune", *arguments], path)

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        """The same from bash, where ``autotune`` is the command; the first command's code in a pipe counts."""
        function = f'autotune() {{ exec {sys.executable} -m autotune "$@"; }}'
        return start(["bash", "-c", f"{function}; set -o pipefail; ({line})"], toy_package)

    run.folder = work  # type: ignore[attr-defined]
    run.shell = shell  # type: ignore[attr-defined]
    return run

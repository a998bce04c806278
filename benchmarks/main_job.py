"""What the main job costs: seconds, seconds to the first trial, and peak memory of all its processes.

    python benchmarks/main_job.py attention --trials 200

Runs `python -m autotune` with the arguments given, in a fresh folder, and samples its process tree. Memory
is the proportional set size (shared pages counted once), from /proc: Linux only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

INTERVAL_S = 0.25


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants, as far as they can be read."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def memory_mib(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        if match := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE):
            total += int(match[1])
    return total / 1024


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    first_trial: float | None = None
    peak, processes = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autotune", *arguments, "--results", f"{folder}/results"]
        job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

        def watch_progress() -> None:
            nonlocal first_trial
            for line in job.stderr:  # type: ignore[union-attr]
                if first_trial is None and re.match(r"\d+/\d+ trials", line):
                    first_trial = time.monotonic() - started
                sys.stderr.write(line)

        reader = threading.Thread(target=watch_progress)
        reader.start()
        while job.poll() is None:
            pids = process_tree(job.pid)
            used = memory_mib(pids)
            if used > peak:
                peak, processes = used, len(pids)
            time.sleep(INTERVAL_S)
        reader.join()
    seconds = time.monotonic() - started
    first = "none reported" if first_trial is None else f"{first_trial:.1f} s"
    print(f"\n{'seconds':<32}{seconds:8.1f}")
    print(f"{'first trial reported after':<32}{first:>10}")
    print(f"{'peak memory, all processes':<32}{peak / 1024:8.2f} GiB ({processes} processes)")
    return job.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Every block of code in the README and the docs runs, in the order of its page, in an empty folder.

A comment before a block says otherwise: ``<!-- not run: why -->``, or the name of a command that ``.ci/run`` takes out
of the README itself. Blocks without a language are outputs and drawings.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
BY_CI = ("main job", "tests")
SHOWN = ("", "json", "toml")  # what is shown rather than run
TRIALS = "3"  # for however many a reader is told to try


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("not run: ") and self.mark not in BY_CI


def blocks(page: Path) -> list[Block]:
    """The page's code, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        if match["language"] not in SHOWN:
            line = text.count("\n", 0, match.start("text"))
            found.append(Block(page, line, match["language"], match["mark"] or "", match["text"]))
    return found


def test_every_block_is_of_a_kind_that_is_run():
    for page in PAGES:
        for block in blocks(page):
            where = f"{page.name}:{block.line}"
            assert block.language in ("sh", "python"), f"{where}: {block.language} is neither sh nor python"
            known = not block.mark or block.mark in BY_CI or re.fullmatch("not run: .{10,}", block.mark)
            assert known, f"{where}: nothing is known of <!-- {block.mark} -->"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_page_runs(page: Path, tmp_path: Path):
    """With a few trials where a reader is told to run many."""
    _run([block for block in blocks(page) if block.runs], tmp_path, timeout_s=900)


def _run(chosen: list[Block], folder: Path, *, timeout_s: float) -> None:
    """Commands one block after the other; all Python as one program, which a later block may build upon."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "120"}
    for block in (block for block in chosen if block.language == "sh"):
        text = re.sub(r"--trials \d+", f"--trials {TRIALS}", block.text)
        _finish(["bash", "-euo", "pipefail", "-c", text], folder, environment, timeout_s, block)
    program = [block for block in chosen if block.language == "python"]
    if program:
        script = folder / "page.py"  # A file: what tunes in other processes must be found by them.
        script.write_text("\n".join(block.text for block in program), encoding="utf-8")
        _finish([sys.executable, str(script)], folder, environment, timeout_s, program[0])


def _finish(command: list[str], folder: Path, environment: dict[str, str], timeout_s: float, block: Block) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{block.page.name}:{block.line}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
def test_the_reference_has_every_public_module(tmp_path: Path):
    pytest.importorskip("pdoc", reason="the reference needs the extra [docs]")
    command = [sys.executable, "-W", "error", str(ROOT / "docs" / "build_reference.py"), str(tmp_path / "reference")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "reference" / "kernels" / "attention.html").read_text(encoding="utf-8")
    assert "kv_heads" in page  # of a docstring that is loaded only when it is asked for

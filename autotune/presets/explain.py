"""Why a lookup takes what it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.chips import Chip
from autotune.kernel import Kernel
from autotune.presets import sources
from autotune.presets.entry import Preset
from autotune.presets.policy import current_policy
from autotune.presets.resolve import Match, asked, find, indexed, tune_command, why_not
from autotune.problem import Problem
from autotune.space import format_config

SHOWN = 8  # presets that were not taken, in the text
_HOW = {
    "pinned": "given for every problem of this kernel by presets.using",
    "exact": "the preset for this very problem, in {}",
    "nearest": "the preset for the nearest problem that is valid here, in {}",
    "heuristic": "the kernel's own config: no preset can stand for this problem",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One preset that was looked at and not taken.

    Attributes:
        preset: It.
        place: Its file or folder.
        distance: How far its problem is: 0 for the same, infinite where dtype or an option is another.
        reason: Why it was not taken.
    """

    preset: Preset
    place: str
    distance: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` gives; as text, some lines that say it.

    Attributes:
        kernel: The kernel's name.
        problem: What was asked for.
        device_kind: On which device.
        match: What a lookup takes.
        others: The presets of that kernel and device kind that it does not take, nearest first, each with the reason.
        places: Where was looked, the last first.
        command: What would tune this problem.
    """

    kernel: str
    problem: Problem
    device_kind: str
    match: Match
    others: tuple[Verdict, ...]
    places: tuple[str, ...]
    command: str

    def __str__(self) -> str:
        lines = [
            f"{self.kernel} {self.problem} on {self.device_kind}",
            f"config  {format_config(self.match.config)}",
            f"from    {_HOW[self.match.how].format(self.match.place)}",
        ]
        if (taken := self.match.preset) is not None:
            if self.match.how == "nearest":
                lines.append(f"        for {_problem(taken)}")
            lines.append(f"        {taken.time_ms:.4g} ms, {taken.source}, {taken.date or 'of unknown date'}")
            lines += [f"        it {words}" for words in self.match.stale.values()]
        if self.match.how != "exact":
            lines.append(f"tune it {self.command}")
        for verdict in self.others[:SHOWN]:
            lines.append(f"not     {_problem(verdict.preset)} in {verdict.place}: {verdict.reason}")
        if len(self.others) > SHOWN:
            lines.append(f"        and {len(self.others) - SHOWN} more")
        return "\n".join([*lines, f"looked  {', '.join(self.places) or 'nowhere: there are no presets'}"])


def explain(kernel: str | Kernel, problem: Problem | Mapping[str, Any], *, device_kind: str) -> Explanation:
    """Which config `lookup` takes and why, and why it takes no other. It warns of nothing and tunes nothing.

    Args, errors: As of `lookup`.

    Example:
        >>> print(explain("matmul", {"m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16"}, device_kind="v6e"))
    """
    kernel, problem, chip = asked(kernel, problem, device_kind)
    match = find(kernel, problem, chip)
    return Explanation(
        kernel.name,
        problem,
        chip.device_kind,
        match,
        tuple(_others(kernel, problem, chip, match)),
        tuple(str(place) for place in reversed(sources.search_path())),
        tune_command(kernel, problem, chip),
    )


def _others(kernel: Kernel, problem: Problem, chip: Chip, match: Match) -> list[Verdict]:
    files = sources.stamps(kernel.name, chip.device_kind)
    index = indexed(kernel, chip.device_kind, files, sources.given())
    space, policy = kernel.space(problem, chip), current_policy()
    verdicts = []
    for apart, candidate in index.near(problem):
        if candidate.preset is match.preset:
            continue
        reason = why_not(kernel, space, candidate.preset, policy)
        if reason is None and match.how == "pinned":
            reason = "presets.using gave a config"
        if reason is None and match.how == "exact" and not apart:
            reason = "another for the same problem comes first: given by using, measured, or of a later place"
        if reason is None:
            reason = "another is nearer" if match.how == "nearest" else "there is one for this very problem"
        verdicts.append(Verdict(candidate.preset, candidate.place, apart, reason))
    unlike = "its dtype or an option is another"
    verdicts += [Verdict(one.preset, one.place, float("inf"), unlike) for one in index.unlike(problem)]
    return verdicts + [Verdict(one.preset, one.place, float("inf"), reason) for one, reason in index.left_out]


def _problem(preset: Preset) -> str:
    return ",".join(f"{name}={value}" for name, value in preset.problem.items() if value not in (None, False))

"""Who wins on a device: finalists against each other, then the winner against the baselines, in fresh processes.

One measurement of each config ranks them; it does not show that the first is faster than the second, let alone than a
baseline that was measured an hour before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from autotune.engines._base import Engine, Race
from autotune.noise import Spread, ratio_of_races, spread
from autotune.outcome import Config, Outcome
from autotune.search.trials import TrialRecord
from autotune.space import config_key

Rivals = Mapping[str, tuple[Config | None, Outcome]]
"""Baselines by name: the config (None is the reference), and the outcome known of it."""
FINALISTS = 8
# Slower than the fastest by more than this, a config does not win a race; a baseline so much slower needs none.
CLOSE, FAR = 1.25, 10.0
RACE_S, CONFIRM_S = 4.0, 2.0
CONFIRMATIONS = 7
_RACE_SEED, _CONFIRM_SEED = 1_000, 2_000  # other inputs than those that chose


@dataclasses.dataclass(frozen=True)
class Final:
    """The winner, and what it was shown to gain.

    Attributes:
        winner: The fastest, its outcome's time and interval from the fresh processes (beside the first baseline).
        baselines: Of each baseline that ran beside it, its time.
        ratios: Of each of those, how many times as long it takes.
        far: Baselines that did not run, as their trial had shown them to be slower many times over.
    """

    winner: TrialRecord
    baselines: Mapping[str, Outcome]
    ratios: Mapping[str, Spread]
    far: frozenset[str] = frozenset()

    def gains_over(self, baseline: str) -> bool | None:
        """Whether the winner was shown to be faster: the whole interval says so. None: they were not compared."""
        if baseline in self.far:
            return True
        ratio = self.ratios.get(baseline)
        return None if ratio is None else ratio.low > 1.0


def close_ones(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Of records fastest first, those that may turn out the fastest: a trial's luck is worth several percent."""
    best = records[0].outcome.time_ms if records else None
    return [record for record in records[:FINALISTS] if best and (record.outcome.time_ms or 0.0) <= CLOSE * best]


def decide(
    engine: Engine,
    finalists: Sequence[TrialRecord],
    judge: Callable[[TrialRecord], bool | None],
    baselines: Callable[[], Rivals | None],
    result: Callable[[Future[Race]], Race | None],
    say: Callable[[str], None] = lambda line: None,
) -> Final | None:
    """Races the finalists; the first of them that is right then races the baselines.

    Args:
        engine: One that measures.
        finalists: At least one, each of which ran.
        judge: Whether a config is shown right; None where the run was interrupted meanwhile.
        baselines: Gives name to config (None is the reference) and the outcome known of it; None as `judge`.
        result: Waits for a future; gives None where the run was interrupted meanwhile.
        say: Is told what goes on.

    Returns:
        None where the run was interrupted, or no finalist is right and can be run again and again.
    """
    with contextlib.suppress(_Interrupted):
        for winner in _ranked(engine, finalists, result, say):
            right = judge(winner)
            rivals = baselines() if right else {}
            if right is None or rivals is None:
                return None
            if right and (final := _confirm(engine, winner, rivals, result, say)) is not None:
                return final
    return None


class _Interrupted(Exception):
    """A race was not waited for."""


def _all(pending: Sequence[Future[Race]], result: Callable[[Future[Race]], Race | None]) -> list[Race]:
    """The races, once they are over. Raises _Interrupted, and gives up those that are left, where one is not."""
    races: list[Race] = []
    for future in pending:
        race = result(future)
        if race is None:
            for one in pending:
                one.cancel()
            raise _Interrupted
        races.append(race)
    return races


def _ranked(
    engine: Engine,
    finalists: Sequence[TrialRecord],
    result: Callable[[Future[Race]], Race | None],
    say: Callable[[str], None],
) -> Sequence[TrialRecord]:
    """The finalists by their medians in one race; by their trials where it failed."""
    if len(finalists) < 2:
        return finalists
    say(f"racing the {len(finalists)} fastest")
    configs = [record.config for record in finalists]
    (race,) = _all([engine.race(configs, seconds=RACE_S, seed=_RACE_SEED)], result)
    if not race.ok:
        return finalists
    medians = [statistics.median(samples) for samples in race.samples]
    return [record for _, _, record in sorted(zip(medians, range(len(medians)), finalists, strict=True))]


def _confirm(
    engine: Engine,
    winner: TrialRecord,
    baselines: Rivals,
    result: Callable[[Future[Race]], Race | None],
    say: Callable[[str], None],
) -> Final | None:
    """The winner beside each baseline; None where it cannot be run again and again.

    In pairs: a third program in the process changes both times (what it leaves of memory and caches), and one that
    fails would take the others with it.
    """
    own, time_ms = config_key(winner.config), winner.outcome.time_ms or 0.0
    others = {
        name: (config, outcome)
        for name, (config, outcome) in baselines.items()
        if outcome.ok and (config is None or config_key(config) != own)
    }
    far = frozenset(name for name, (_, outcome) in others.items() if (outcome.time_ms or 0.0) > FAR * time_ms)
    beside = [name for name in others if name not in far]
    groups = [[winner.config, others[name][0]] for name in beside] or [[winner.config]]
    races = _races(engine, groups, beside, result, say)
    pairs = {name: _Pair(r, others[name][1]) for name, r in zip(beside, races, strict=False) if len(r) >= 2}
    if beside and not pairs:
        races = _races(engine, [[winner.config]], [], result, say)
    own_races = next((pair.races for pair in pairs.values()), races[0])
    if len(own_races) < 2:
        return None
    return Final(
        dataclasses.replace(winner, outcome=_timed(winner.outcome, own_races, 0)),
        {name: _timed(pair.outcome, pair.races, 1) for name, pair in pairs.items()},
        {name: ratio_of_races([(r.samples[1], r.samples[0]) for r in pair.races]) for name, pair in pairs.items()},
        far,
    )


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The races of the winner (first) and a baseline, and what was known of the baseline."""

    races: Sequence[Race]
    outcome: Outcome


def _races(
    engine: Engine,
    groups: Sequence[Sequence[Config | None]],
    beside: Sequence[str],
    result: Callable[[Future[Race]], Race | None],
    say: Callable[[str], None],
) -> list[list[Race]]:
    """Of each group, those that worked of several races, each in a process of its own and on inputs of its own.

    The groups take turns, so that each sees as much of what else goes on in the machine as the whole takes.
    """
    names = f" beside {' and '.join(beside)}" if beside else ""
    say(f"measuring the fastest{names} in {CONFIRMATIONS} fresh processes{' each' if len(beside) > 1 else ''}")
    pending = [
        engine.race(entries, seconds=CONFIRM_S, seed=_CONFIRM_SEED + 10 * number, fresh=True)
        for number in range(CONFIRMATIONS)
        for entries in groups
    ]
    raced = _all(pending, result)
    failed = [race for race in raced if not race.ok]
    if failed:
        lines = failed[0].message.strip().splitlines() or [""]
        say(f"{len(failed)} of {len(raced)} races failed: {failed[0].status.value}: {lines[0][:300]}")
    return [[race for race in raced[place :: len(groups)] if race.ok] for place in range(len(groups))]


def _timed(outcome: Outcome, races: Sequence[Race], place: int) -> Outcome:
    """The outcome with the time that the fresh processes gave."""
    samples = [race.samples[place] for race in races]
    time = spread([statistics.median(one) for one in samples])
    return dataclasses.replace(
        outcome,
        time_ms=time.value,
        interval_ms=(time.low, time.high),
        repeats=sum(map(len, samples)),
        timer=races[0].timer,
    )

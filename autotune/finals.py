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

FINALISTS = 4
# Slower than the fastest by more than this, a config does not win a race; a baseline so much slower needs none.
CLOSE, FAR = 1.10, 10.0
RACE_S, CONFIRM_S = 4.0, 2.0
CONFIRMATIONS = 5
_RACE_SEED, _CONFIRM_SEED = 1_000, 2_000  # other inputs than those that chose


@dataclasses.dataclass(frozen=True)
class Final:
    """The winner, and what it was shown to gain.

    Attributes:
        winner: The fastest, its outcome's time and interval from the fresh processes.
        baselines: Of each baseline that ran beside it, its time.
        ratios: Of each baseline, how many times as long it takes.
    """

    winner: TrialRecord
    baselines: Mapping[str, Outcome]
    ratios: Mapping[str, Spread]

    def gains_over(self, baseline: str) -> bool:
        """Whether the winner was shown to be faster: the whole interval says so."""
        ratio = self.ratios.get(baseline)
        return ratio is None or ratio.low > 1.0


def close_ones(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Of records fastest first, those that may turn out the fastest."""
    best = records[0].outcome.time_ms if records else None
    return [record for record in records[:FINALISTS] if best and (record.outcome.time_ms or 0.0) <= CLOSE * best]


def decide(
    engine: Engine,
    finalists: Sequence[TrialRecord],
    baselines: Mapping[str, tuple[Config | None, Outcome]],
    result: Callable[[Future[Race]], Race | None],
    say: Callable[[str], None] = lambda line: None,
) -> Final | None:
    """Races the finalists, then the winner against the baselines.

    Args:
        engine: One that measures.
        finalists: At least one, each shown right.
        baselines: Name to config (None is the reference) and the outcome known of it.
        result: Waits for a future; gives None where the run was interrupted meanwhile.
        say: Is told what goes on.

    Returns:
        None where the run was interrupted, or no finalist can be run again and again.
    """
    with contextlib.suppress(_Interrupted):
        for winner in _ranked(engine, finalists, result, say):
            final = _confirm(engine, winner, baselines, result, say)
            if final is not None:
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
    baselines: Mapping[str, tuple[Config | None, Outcome]],
    result: Callable[[Future[Race]], Race | None],
    say: Callable[[str], None],
) -> Final | None:
    """Several races in processes of their own; None where fewer than two of them worked."""
    own = config_key(winner.config)
    rivals = {
        name: config
        for name, (config, outcome) in baselines.items()
        if outcome.ok
        and (config is None or config_key(config) != own)
        and (outcome.time_ms or 0.0) <= FAR * (winner.outcome.time_ms or 0.0)
    }
    say(f"measuring the fastest{' and ' if rivals else ''}{', '.join(rivals)} in {CONFIRMATIONS} fresh processes")
    entries = [winner.config, *rivals.values()]
    pending = [
        engine.race(entries, seconds=CONFIRM_S, seed=_CONFIRM_SEED + 10 * number, fresh=True)
        for number in range(CONFIRMATIONS)
    ]
    raced = _all(pending, result)
    races = [race for race in raced if race.ok]
    if failed := next((race for race in raced if not race.ok), None):
        lines = failed.message.strip().splitlines() or [""]
        say(f"{len(raced) - len(races)} of {len(raced)} races failed: {failed.status.value}: {lines[0][:300]}")
    if len(races) < 2:
        return None
    outcomes = [
        _timed(base, [race.samples[place] for race in races], races[0].timer)
        for place, base in enumerate([winner.outcome, *(baselines[name][1] for name in rivals)])
    ]
    ratios = {
        name: ratio_of_races([(race.samples[place], race.samples[0]) for race in races])
        for place, name in enumerate(rivals, start=1)
    }
    return Final(dataclasses.replace(winner, outcome=outcomes[0]), dict(zip(rivals, outcomes[1:], strict=True)), ratios)


def _timed(outcome: Outcome, samples: Sequence[Sequence[float]], timer: str) -> Outcome:
    """The outcome with the time that the fresh processes gave."""
    time = spread([statistics.median(one) for one in samples])
    repeats = sum(map(len, samples))
    return dataclasses.replace(
        outcome, time_ms=time.value, interval_ms=(time.low, time.high), repeats=repeats, timer=timer
    )

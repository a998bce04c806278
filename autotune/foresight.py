"""What was predicted of a task's configs before they are measured: where to begin, and what to compare with."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from autotune.accuracy.statistics import spearman
from autotune.engines._base import Engine, Task
from autotune.outcome import Config, Outcome, Source, Status
from autotune.search.encoding import Encoding
from autotune.search.interrupt import Interrupt
from autotune.search.loop import Search, SearchSettings, StopReason
from autotune.search.study import identity, load_records, study_name
from autotune.search.trials import TrialRecord, fastest_first
from autotune.space import config_key

# Share of the trials that measure what was predicted to be fastest; the sampler, learning from those, decides others.
FORESEEN_SHARE = 0.5


class Foresight:
    """The predictions for one task: those of the compiler's study of it in the results folder, and arithmetic else.

    Args:
        task: As of the engine that measures.
        settings: Where the studies are, and whose seed the study has.
    """

    def __init__(self, task: Task, settings: SearchSettings) -> None:
        self._task, self._settings = task, settings

    @functools.cached_property
    def _compiled(self) -> Sequence[TrialRecord]:
        task, settings = self._task, self._settings
        if not task.chip.known:
            return []
        encoding = Encoding(task.kernel.space(task.problem, task.chip), self._baselines)
        name = study_name(identity(task, "compiler", settings.seed, encoding))
        return load_records(settings.results, name) or []

    @property
    def _baselines(self) -> list[Config]:
        return list(self._task.kernel.baselines(self._task.problem, self._task.chip).values())

    def best(self, trials: int) -> list[Config]:
        """The configs that the compiler's schedule puts first, as many as a run of `trials` should begin with."""
        return [record.config for record in fastest_first(self._compiled)[: round(trials * FORESEEN_SHARE)]]

    @functools.cached_property
    def _outcomes(self) -> dict[tuple, Outcome]:
        return {config_key(record.config): record.outcome for record in self._compiled if record.outcome.ok}

    def predicted(self, config: Config) -> Outcome:
        """What was predicted for `config`."""
        known = self._outcomes.get(config_key(config))
        if known is not None:
            return known
        task = self._task
        if (time_ms := task.kernel.known_ms(task.problem, config, task.chip)) is None:
            return None
        return Outcome(Status.OK, time_ms=time_ms, source=Source.ANALYTIC)


def predict(
    engine: Engine, settings: SearchSettings, on_trial: Callable[[TrialRecord], None], *, started: float
) -> StopReason:
    """Fills the compiler's study of the engine's task, from which `Foresight` reads; what is there is not done again.

    Args:
        engine: One that predicts, of the task that will be measured.
        settings: Those of the run that will measure; its study is kept in the results folder in any case.
        on_trial: Called after each prediction.
        started: `time.monotonic()` of the run's start, from which its budget counts: half of it is for predictions.

    Returns:
        Why it ended.
    """
    task = engine.task
    budget_s = settings.budget_s / 2 if settings.budget_s else None
    here = dataclasses.replace(settings, storage=None, study=None, budget_s=budget_s)
    with Interrupt() as interrupt:
        search = Search(engine, task.kernel.baselines(task.problem, task.chip), here)
        return search.run(on_trial, interrupt, started=started)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well predictions ranked what was then measured.

    Attributes:
        spearman: Correlation of the ranks.
        configs: How many it is over.
        source: Where the predictions came from.
    """

    spearman: float
    configs: int
    source: Source


def agreement(records: Iterable[TrialRecord]) -> Agreement | None:
    """Of the kind of prediction that most of the measured configs have; None with fewer than three."""
    known = [r.outcome for r in records if r.outcome.measured and r.outcome.predicted_ms and r.outcome.predicted_by]
    if not known:
        return None
    source, _ = Counter(outcome.predicted_by for outcome in known).most_common(1)[0]
    alike = [outcome for outcome in known if outcome.predicted_by is source]
    correlation = spearman([one.predicted_ms for one in alike], [one.time_ms for one in alike])
    if len(alike) < 3 or correlation is None:
        return None
    return Agreement(correlation, len(alike), source)

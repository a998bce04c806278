"""A tuning study: an Optuna study whose trials are configs and outcomes."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.engines._base import Task
from autotune.errors import UsageError
from autotune.outcome import Config, Outcome
from autotune.search.encoding import Encoding
from autotune.search.storage import journal_path, open_storage
from autotune.search.trials import TrialRecord, read_trials
from autotune.space import config_key, format_config
from autotune.validation import Validation

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

    from autotune.search.pool import Pool

_VALIDATION, _REFERENCE, _IDENTITY = "validation:", "reference", "identity"
# A trial that another machine left running is given up after this long: no trial takes it.
ORPHAN_AGE_S = 3600.0


def identity(task: Task, engine: str, seed: int, encoding: Encoding) -> dict[str, str]:
    """What makes two runs one study: only such runs have comparable times and the same encoding."""
    return {
        "kernel": task.kernel.name,
        "version": task.kernel.version,
        "problem": str(task.problem),
        "target": task.chip.name,
        "engine": engine,
        "seed": str(seed),
        "space": encoding.digest,
    }


def study_name(parts: Mapping[str, str]) -> str:
    """A readable name that the same command line gives again: ``matmul-v5e-compiler-1f0c22ab``."""
    digest = hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:8]
    return f"{parts['kernel']}-{parts['target']}-{parts['engine']}-{digest}"


class TuningStudy:
    """Opens a study, or goes on with it.

    Args:
        parts: From `identity`.
        encoding: Of the space.
        pool: Gives the ranked configs; called when first needed.
        storage: As on the command line; None for a journal file in `results`.
        results: The results folder.
        name: The study's name; None for the one derived from `parts`.

    Raises:
        UsageError: A study of that name exists and was made for something else.
        ResultsError: The storage cannot be read.
    """

    def __init__(
        self,
        parts: Mapping[str, str],
        encoding: Encoding,
        pool: Callable[[], Pool],
        *,
        storage: str | None,
        results: Path,
        name: str | None = None,
    ) -> None:
        import optuna

        from autotune.search.sampler import SpaceSampler

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.name = name or study_name(parts)
        self._encoding = encoding
        self._distributions = encoding.distributions()
        sampler = SpaceSampler(encoding, pool, self.taken, seed=int(parts["seed"]))
        self._study = optuna.create_study(
            study_name=self.name,
            storage=open_storage(storage, results, self.name),
            sampler=sampler,
            direction="minimize",
            load_if_exists=True,
        )
        known = self._study.user_attrs.get(_IDENTITY)
        if known is None:
            self._study.set_user_attr(_IDENTITY, dict(parts))
        elif differing := [key for key in parts if known.get(key) != parts[key]]:
            was = ", ".join(f"{key} {known.get(key)}" for key in differing)
            raise UsageError(f"study {self.name} was made for {was}: repeat that, or leave --study out")

    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def records(self) -> list[TrialRecord]:
        """The evaluated configs, each once."""
        return read_trials(self.trials(), self.validations())

    def taken(self) -> set:
        """Keys of the configs that are evaluated, in flight or waiting; an abandoned one is free again."""
        from optuna.trial import TrialState

        return {key for trial in self.trials() if trial.state is not TrialState.FAIL and (key := self._key(trial))}

    def ask(self) -> tuple[Trial, dict[str, Any]]:
        """The next trial and its config: what waits in the queue first, then the sampler's proposal."""
        trial = self._study.ask(self._distributions)
        config = self._encoding.decode(trial.params)
        trial.set_user_attr("config", config)
        trial.set_user_attr("owner", [socket.gethostname(), os.getpid()])
        return trial, config

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Records an outcome. What did not work has no time, and teaches the sampler as a broken constraint."""
        from optuna.trial import TrialState

        trial.set_user_attr("outcome", outcome.to_dict())
        if outcome.ok:
            self._study.tell(trial, outcome.time_ms)
        else:
            trial.set_constraint(outcome.status.value, 1.0)
            self._study.tell(trial, state=TrialState.PRUNED)

    def abandon(self, trial: Trial) -> None:
        """Gives up a trial that did not end; its config may be tried again."""
        from optuna.trial import TrialState

        self._study.tell(trial, state=TrialState.FAIL)

    def enqueue(self, config: Config) -> bool:
        """Puts `config` at the end of the queue, unless some trial has it already."""
        if config_key(config) in self.taken():
            return False
        self._study.enqueue_trial(self._encoding.encode(config))
        return True

    @property
    def waiting(self) -> int:
        """Trials in the queue."""
        from optuna.trial import TrialState

        return sum(trial.state is TrialState.WAITING for trial in self.trials())

    def recover(self) -> int:
        """Fails the trials that a killed run left running and queues their configs; returns how many."""
        from optuna.trial import TrialState

        orphans = [t for t in self.trials() if t.state is TrialState.RUNNING and _orphaned(t)]
        for trial in orphans:
            self._study.tell(trial.number, state=TrialState.FAIL)
        for config in self._abandoned():
            self.enqueue(config)
        return len(orphans)

    def validations(self) -> dict[str, Validation]:
        """Verdicts by the config's text."""
        return _validations(self._study)

    def keep_validation(self, config: Config, validation: Validation) -> None:
        """Remembers a verdict, so that a resumed run need not find out again."""
        self._study.set_user_attr(_VALIDATION + format_config(config), validation.to_dict())

    @property
    def reference(self) -> Outcome | None:
        """The reference's outcome, where it is known."""
        fields = self._study.user_attrs.get(_REFERENCE)
        return Outcome.from_dict(fields) if fields else None

    def keep_reference(self, outcome: Outcome) -> None:
        self._study.set_user_attr(_REFERENCE, outcome.to_dict())

    def _abandoned(self) -> Iterator[dict[str, Any]]:
        from optuna.trial import TrialState

        for trial in self.trials():
            if trial.state is TrialState.FAIL and "config" in trial.user_attrs:
                yield trial.user_attrs["config"]

    def _key(self, trial: FrozenTrial) -> tuple | None:
        """The config's identity; None in the moment before the sampler has chosen one."""
        params = trial.params or trial.system_attrs.get("fixed_params") or {}
        if len(params) < len(self._distributions):
            return None
        return config_key(self._encoding.decode(params))


def _orphaned(trial: FrozenTrial) -> bool:
    """Whether the process that ran `trial` is gone (another host's is trusted for an hour)."""
    host, pid = trial.user_attrs.get("owner", (None, None))
    if host == socket.gethostname():
        return pid == os.getpid() or not _alive(pid)
    started = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    return time.time() - started > ORPHAN_AGE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def load_records(results: Path, name: str) -> list[TrialRecord] | None:
    """The records of a finished or running study in its default file, only read; None where there is no such file.

    Raises:
        ResultsError: The file cannot be read.
    """
    import optuna

    path = journal_path(None, results, name)
    if path is None or not path.is_file():
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(None, results, name)
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return None
    return read_trials(study.get_trials(deepcopy=False), _validations(study))


def _validations(study: Any) -> dict[str, Validation]:
    return {
        key.removeprefix(_VALIDATION): Validation.from_dict(fields)
        for key, fields in study.user_attrs.items()
        if key.startswith(_VALIDATION)
    }

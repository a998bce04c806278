"""A tuning study: an Optuna study whose trials are configs and outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import versions
from autotune.chips import GIB
from autotune.engines._base import Task
from autotune.errors import UsageError
from autotune.outcome import Config, Outcome, Status
from autotune.processes import is_running
from autotune.search.encoding import Encoding
from autotune.search.storage import journal_path, look_into, open_storage, reading, shown
from autotune.search.trials import TrialRecord, read_trials
from autotune.space import config_key, format_config
from autotune.validation import Validation

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

    from autotune.search.pool import Pool

_VALIDATION, _REFERENCE, _IDENTITY, _LIMIT = "validation:", "reference", "identity", "limit_s"
_OWNER = "owner"
# A trial that another machine left running is given up after this long: no trial takes it.
ORPHAN_AGE_S = 3600.0
# Also a file's name and part of a path.
NAMES = re.compile(r"(?!\.)[\w.-]{1,100}", re.ASCII)


def identity(task: Task, engine: str, seed: int, encoding: Encoding) -> dict[str, str]:
    """What makes two runs one study: only such runs have comparable times and the same encoding.

    The versions are part of it: the compiler of another libtpu schedules otherwise. So is the machine, where it is
    what is measured.
    """
    return {
        "kernel": task.kernel.name,
        "version": task.kernel.version,
        "problem": str(task.problem),
        "target": task.chip.name,
        "engine": engine,
        "seed": str(seed),
        "space": encoding.digest,
        **versions.deciding(task.chip.platform),
    }


def study_name(parts: Mapping[str, str]) -> str:
    """A readable name that the same command line gives again: ``matmul-v5e-compiler-1f0c22ab``."""
    digest = hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:8]
    kernel = re.sub(r"[^\w-]+", "_", parts["kernel"], flags=re.ASCII)[:50]  # A third party may call it anything.
    return f"{kernel}-{parts['target']}-{parts['engine']}-{digest}"


def check_name(name: str) -> None:
    """Raises UsageError unless `name` can be a study's."""
    if NAMES.fullmatch(name) is None:
        right = "up to 100 letters, digits, dots, dashes and underscores, and no leading dot"
        raise UsageError(f"--study {name[:120]}: use {right}")


def check_studies(wanted: Mapping[str, Mapping[str, str]], storage: str | None, results: Path) -> None:
    """Looks before anything is started, and changes nothing, whether a study could be opened.

    Args:
        wanted: Possible names, each with what must hold of a study of that name.
        storage: As on the command line.
        results: The results folder.

    Raises:
        UsageError: A study of that name was made for something else, or the storage cannot be used.
        ResultsError: The storage cannot be read.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storages: dict[Path | None, Any] = {}
    for name, parts in wanted.items():
        check_name(name)
        path = journal_path(storage, results, name)
        if path not in storages:
            storages[path] = look_into(storage, results, name)
        if (opened := storages[path]) is None:
            continue
        with reading(shown(storage, results, name)):
            study = _load(name, opened)
            if study is not None:
                _check_identity(study, parts)
                read_trials(study.get_trials(deepcopy=False), _validations(study))


def _load(name: str, storage: Any, sampler: Any = None) -> Any:
    """Optuna's study of that name; None where there is none."""
    import optuna

    try:
        storage.get_study_id_from_name(name)
    except KeyError:
        return None
    return optuna.load_study(study_name=name, storage=storage, sampler=sampler)


def _check_identity(study: Any, parts: Mapping[str, str]) -> None:
    known = study.user_attrs.get(_IDENTITY)
    if known is None:
        return
    if differing := [key for key in parts if known.get(key) != parts[key]]:
        was = ", ".join(f"{key} {known.get(key, 'unknown')} (now {parts[key]})" for key in differing)
        raise UsageError(f"study {study.study_name} was made for {was}: repeat that, or leave --study out")


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
        check_name(self.name)
        sampler = SpaceSampler(encoding, pool, self.taken, seed=int(parts["seed"]))
        opened = open_storage(storage, results, self.name)
        # Failed trials that this run tries once more: until that ended, they count for nothing.
        self._again: set[int] = set()
        with reading(shown(storage, results, self.name)):
            self._study = _load(self.name, opened, sampler) or optuna.create_study(
                study_name=self.name, storage=opened, sampler=sampler, direction="minimize", load_if_exists=True
            )
            _check_identity(self._study, parts)
            if _IDENTITY not in self._study.user_attrs:
                self._study.set_user_attr(_IDENTITY, dict(parts))
            self.records()

    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def records(self) -> list[TrialRecord]:
        """The evaluated configs, each once."""
        return read_trials(self.trials(), self.validations())

    @property
    def done(self) -> int:
        """Configs evaluated, by whichever process."""
        return sum(record.number not in self._again for record in self.records())

    @property
    def in_flight_elsewhere(self) -> int:
        """Trials that other processes are working on."""
        from optuna.trial import TrialState

        running = [trial for trial in self.trials() if trial.state is TrialState.RUNNING]
        return sum(_OWNER in trial.user_attrs and not _orphaned(trial) for trial in running)

    def taken(self) -> set:
        """Keys of the configs that are evaluated, in flight or waiting; an abandoned one is free again."""
        from optuna.trial import TrialState

        return {
            key
            for trial in self.trials()
            if trial.state is not TrialState.FAIL
            and trial.number not in self._again
            and (key := self._key(trial)) is not None
        }

    def ask(self) -> tuple[Trial, dict[str, Any]] | None:
        """The next trial and its config: what waits in the queue first, then the sampler's proposal.

        None where there is nothing more to propose.
        """
        from optuna.trial import TrialState

        from autotune.search.sampler import SpaceExhausted

        while True:
            try:
                trial = self._study.ask(self._distributions)
            except SpaceExhausted as exhausted:
                self._study.tell(exhausted.number, state=TrialState.FAIL)
                return None
            config = self._encoding.decode(trial.params)
            trial.set_user_attr(_OWNER, [socket.gethostname(), os.getpid()])
            if not self._claimed(trial, config):
                trial.set_user_attr("config", config)
                return trial, config
            self.abandon(trial)

    def _claimed(self, trial: Trial, config: Config) -> bool:
        """Whether another trial took `config` in the moment in which this one chose it."""
        from optuna.trial import TrialState

        key, free = config_key(config), (TrialState.FAIL, TrialState.WAITING)
        return any(
            other.number != trial.number
            and other.state not in free
            and other.number not in self._again
            and self._key(other) == key
            for other in self.trials()
        )

    def tell(self, trial: Trial, outcome: Outcome, *, limit_s: float) -> None:
        """Records an outcome. What did not work has no time, and teaches the sampler as a broken constraint.

        Args:
            trial: From `ask`.
            outcome: What became of it.
            limit_s: The time it was given: a timeout means nothing without it.
        """
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with contextlib.suppress(UpdateFinishedTrialError):  # Another machine gave it up as lost.
            if outcome.status is Status.TIMEOUT:
                trial.set_user_attr(_LIMIT, limit_s)
            trial.set_user_attr("outcome", outcome.to_dict())
            if outcome.ok:
                self._study.tell(trial, outcome.time_ms)
            else:
                # How far off it is tells the sampler where to look; of most refusals only that they are.
                over = 1.0 if outcome.over_bytes is None else outcome.over_bytes / GIB
                trial.set_constraint(outcome.status.value, over)
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

    def recover(self, limit_s: float) -> None:
        """Queues what an earlier run did not settle.

        These are the trials that a killed run left running, and those that the machine may have failed and not
        the config: a worker died, or ran out of a smaller limit than `limit_s`.
        """
        from optuna.trial import TrialState

        orphans = [t for t in self.trials() if t.state is TrialState.RUNNING and _orphaned(t)]
        for trial in orphans:
            self._study.tell(trial.number, state=TrialState.FAIL)
        trials = {trial.number: trial for trial in self.trials()}
        unsettled = [r for r in self.records() if _may_work_now(r.outcome.status, trials[r.number], limit_s)]
        self._again = {record.number for record in unsettled}
        for config in [*self._abandoned(), *(record.config for record in unsettled)]:
            self.enqueue(config)

    def validations(self) -> dict[str, Validation]:
        """Verdicts by the config's text."""
        return _validations(self._study)

    def keep_validation(self, config: Config, validation: Validation) -> None:
        """Remembers a verdict, so that a resumed run need not find out again. A worker that died gave none."""
        if validation.status.transient:
            return
        self._study.set_user_attr(_VALIDATION + format_config(config), validation.to_dict())

    @property
    def reference(self) -> Outcome | None:
        """The reference's outcome, where it is known."""
        fields = self._study.user_attrs.get(_REFERENCE)
        outcome = Outcome.from_dict(fields) if fields else None
        return None if outcome is None or outcome.status.transient else outcome

    def keep_reference(self, outcome: Outcome) -> None:
        """Remembers what became of the reference, unless it may work the next time."""
        if outcome.status.transient:
            return
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


def _may_work_now(status: Status, trial: FrozenTrial, limit_s: float) -> bool:
    if status is Status.TIMEOUT:
        return trial.user_attrs.get(_LIMIT, 0.0) < limit_s
    return status is Status.CRASH


def _orphaned(trial: FrozenTrial) -> bool:
    """Whether the process that ran `trial` is gone (another host's is trusted for an hour)."""
    host, pid = trial.user_attrs.get(_OWNER, (None, None))
    if host == socket.gethostname():
        return pid == os.getpid() or not is_running(pid)
    started = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    return time.time() - started > ORPHAN_AGE_S


def load_records(results: Path, name: str) -> list[TrialRecord] | None:
    """The records of a finished or running study in its default file, only read; None where there is no such file.

    Raises:
        ResultsError: The file cannot be read.
    """
    import optuna

    if NAMES.fullmatch(name) is None:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if (storage := look_into(None, results, name)) is None:
        return None
    with reading(shown(None, results, name)):
        study = _load(name, storage)
        return None if study is None else read_trials(study.get_trials(deepcopy=False), _validations(study))


_VALIDATION_FIELDS = {field.name for field in dataclasses.fields(Validation)}


def _validations(study: Any) -> dict[str, Validation]:
    """The verdicts; what a newer version adds to one is ignored, and what is none is left out."""
    found = {
        key.removeprefix(_VALIDATION): Validation.from_dict(
            {"problems": ()} | {name: value for name, value in fields.items() if name in _VALIDATION_FIELDS}
        )
        for key, fields in study.user_attrs.items()
        if key.startswith(_VALIDATION)
    }
    return {text: validation for text, validation in found.items() if not validation.status.transient}

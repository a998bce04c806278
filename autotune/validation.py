"""Numerical validation of a config: what was not shown right never becomes a preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.outcome import Status


@dataclasses.dataclass(frozen=True)
class Validation:
    """The verdict on one config, over all of its small problems.

    Attributes:
        status: ok, wrong_result, runtime_error, timeout or crash.
        max_rel_error: Largest ``|got - want|₂ / |want|₂`` over the problems; None where nothing was computed.
        max_element_error: Largest ``|got - want|`` over the root mean square of `want`.
        tolerance: What `max_rel_error` was held to.
        problems: The small problems that were run, as text.
        message: What went wrong, and on which problem.
    """

    status: Status
    max_rel_error: float | None = None
    max_element_error: float | None = None
    tolerance: float | None = None
    problems: tuple[str, ...] = ()
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Validation:
        fields = dict(fields)
        return cls(**{**fields, "status": Status(fields["status"]), "problems": tuple(fields["problems"])})

"""TPE over the valid configs that nobody has tried yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.search.encoding import Encoding
from autotune.search.pool import STARTUP_TRIALS, Pool
from autotune.space import config_key

# Redraws before the proposal is moved to its nearest valid, untried neighbour instead.
REDRAWS = 5


class SpaceExhausted(Exception):
    """Every config is taken: another run on the same study may have taken the last one just now.

    Attributes:
        number: The trial that was to have a proposal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class SpaceSampler(TPESampler):
    """Multivariate TPE whose proposals are always valid and new.

    Plain TPE proposes near the best again and again, and knows no constraint between parameters:
    both would be trials spent on nothing.

    Args:
        encoding: Of the space.
        pool: Gives the configs that may be proposed; called when first needed, as ranking takes a moment.
        taken: Keys of the configs that some trial, finished or not, already has.
        seed: Makes the proposals reproducible.
    """

    def __init__(self, encoding: Encoding, pool: Callable[[], Pool], taken: Callable[[], set], *, seed: int) -> None:
        super().__init__(multivariate=True, n_startup_trials=STARTUP_TRIALS, constant_liar=True, seed=seed)
        self._encoding = encoding
        self._pool = pool
        self._taken = taken
        self._draw = np.random.default_rng(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: dist for name, dist in self._encoding.distributions().items() if not dist.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if "fixed_params" in trial.system_attrs:  # Enqueued: Optuna takes the parameters from there.
            return {}
        pool, taken = self._pool(), self._taken()
        for _ in range(REDRAWS):
            config = self._propose(study, trial, search_space)
            if pool.admits(config) and config_key(config) not in taken:
                break
        else:
            config = pool.nearest(config, taken)
            if config is None:
                raise SpaceExhausted(trial.number)
        params = self._encoding.encode(config)
        return {name: params[name] for name in search_space}

    def _propose(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        params = super().sample_relative(study, trial, search_space) if search_space else {}
        if not params:  # Too few finished trials for a model.
            return {name: values[self._draw.integers(len(values))] for name, values in self._encoding.values.items()}
        alone = {name: values[0] for name, values in self._encoding.values.items() if len(values) == 1}
        return alone | {
            name: self._encoding.values[name][value] if name in self._encoding.ordered else value
            for name, value in params.items()
        }

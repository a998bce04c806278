"""Runs in a process with eight CPU devices: reads jobs from standard input, writes a JSON list of verdicts.

A job names a problem and a config of `train_step`, and may break the train step on purpose: see `BREAKS`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from autotune import validation
from autotune.kernel import get_kernel
from kernels.train_step import layers, loss, resnet, step, transformer
from kernels.train_step.remat import STATISTICS

_psum, _accumulated, _sharded = jax.lax.psum, step._accumulated, layers.Layers.sharded
_checkpoint, _reference_results = jax.checkpoint, validation.reference_results
_normed, _checkpoint_name = resnet.BatchNorm.__call__, resnet.checkpoint_name
_known: dict[str, Any] = {}


def _psum_of_batch_lost(x, axis):
    """The loss is summed over the devices, its gradient is not: each keeps that of its own tokens."""
    if "data" not in axis:
        return _psum(x, axis)
    return jax.lax.stop_gradient(_psum(x, axis) - _psum(x / 8, axis)) + _psum(x / 8, axis)


def _mean_of_sums(both, parts, mesh):
    """Gradients of the micro-batches added up, the loss alone their mean."""
    right = _accumulated(both, parts, mesh)

    def function(parameters, tokens):
        value, gradients, observed = right(parameters, tokens)
        return value, jax.tree.map(lambda x: x * parts, gradients), observed

    return function


def _first_micro_batch(both, parts, mesh):
    """The first micro-batch stands for all."""
    return lambda parameters, tokens: both(parameters, tokens.reshape(-1, parts, tokens.shape[1])[:, 0])


def _own_keys(self, function, in_specs, out_specs):
    """Each device attends to its own part of the length alone."""
    if in_specs == (layers.EXCHANGED,) * 3:
        in_specs, out_specs = (layers.HEADS,) * 3, layers.HEADS
    return _sharded(self, function, in_specs, out_specs)


@jax.custom_vjp
def _stale(x):
    return x


_stale.defvjp(lambda x: (x, None), lambda _, grad: (grad * 1.001,))


def _checkpoint_of_another(function, **options):
    """What is computed again has other gradients than what was computed."""
    if "policy" not in options:  # the loss's
        return _checkpoint(function, **options)
    return _checkpoint(lambda x, blocks: function(_stale(x), blocks), **options)


def _own_statistics(self, x):
    """Each of eight devices normalizes by the statistics of its own images."""
    parts, observed = jax.vmap(lambda part: _normed(self, part))(x.reshape(8, -1, *x.shape[1:]))
    return parts.reshape(x.shape), jax.tree.map(lambda each: each.mean(0), observed)


def _constant_statistics(x, name):
    """Gradients as if means and variances did not depend on what they are of."""
    x = _checkpoint_name(x, name)
    return jax.lax.stop_gradient(x) if name == STATISTICS else x


BREAKS = {
    "none": contextlib.nullcontext,
    "psum": lambda: mock.patch.object(loss.jax.lax, "psum", _psum_of_batch_lost),
    "mean": lambda: mock.patch.object(step, "_accumulated", _mean_of_sums),
    "micro": lambda: mock.patch.object(step, "_accumulated", _first_micro_batch),
    "length": lambda: mock.patch.object(layers.Layers, "sharded", _own_keys),
    "remat": lambda: mock.patch.object(transformer.jax, "checkpoint", _checkpoint_of_another),
    "own": lambda: mock.patch.object(resnet.BatchNorm, "__call__", _own_statistics),
    "constant": lambda: mock.patch.object(resnet, "checkpoint_name", _constant_statistics),
}


def _reference_once(kernel, problem, inputs):
    """The reference's results, which cost as much as the config's, once for each problem; never of broken parts."""
    if str(problem) not in _known:
        whole = mock.patch.object(resnet.BatchNorm, "__call__", _normed)
        with whole, mock.patch.object(resnet, "checkpoint_name", _checkpoint_name):
            _known[str(problem)] = _reference_results(kernel, problem, inputs)
    return _known[str(problem)]


def run(jobs: list[dict]) -> Iterator[dict]:
    kernel = get_kernel("train_step")
    for job in jobs:
        with BREAKS[job["breaks"]](), mock.patch.object(validation, "reference_results", _reference_once):
            found = validation.validate(kernel, kernel.parse_problem(job["problem"]), job["config"])
        jax.clear_caches()
        yield {"status": found.status.value, "error": found.max_rel_error, "message": found.message}


if __name__ == "__main__":
    print(json.dumps(list(run(json.load(sys.stdin)))))

"""A kernel for a mesh over several processes, in which one of them misbehaves on purpose. Workers import it."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, ClassVar

import numpy as np

from autotune.kernel import ArraySpec, Compilable, Cost, Kernel
from autotune.problem import Problem
from autotune.space import Param, Space

CULPRIT = 1  # the process that misbehaves
COMPILING = ("raise", "other_program", "hang_compiling")
RUNNING = ("work", "slow", "abort", "hang")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeetProblem(Problem):
    n: int = 64
    devices: int = 4
    dtype: str = "float32"


def _act(deed: str, x: np.ndarray) -> np.ndarray:
    """Called by the running program, for each of its devices."""
    import jax

    if jax.process_index() == CULPRIT:
        if deed == "slow":
            time.sleep(0.05)
        if deed == "abort":
            os.abort()
        while deed == "hang":
            time.sleep(0.1)
    return np.asarray(x)


class MeetKernel(Kernel):
    """Twice the sum of the rows, which lie on all devices; one process does what `deed` says."""

    name = "meet"
    summary = "for tests"
    problem_type = MeetProblem
    problems: ClassVar = {"only": MeetProblem()}
    sources = ("tests.pod_kernels",)
    platforms = ("cpu",)
    cpu_devices = 4

    def space(self, problem, chip):
        return Space([Param("deed", (*RUNNING, *COMPILING), "what goes wrong")], [])

    def arguments(self, problem):
        return (ArraySpec((problem.n, problem.n), problem.dtype),)

    def devices(self, problem):
        return problem.devices

    def program_inputs(self, problem, seed):
        return self.make_inputs(problem, seed)

    def compilable(self, problem, config, devices):
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        deed = config["deed"] if config else "work"
        culprit = jax.process_index() == CULPRIT
        if culprit and deed == "raise":
            raise RuntimeError("this process cannot")
        while culprit and deed == "hang_compiling":
            time.sleep(0.1)
        mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
        rows = PartitionSpec("rows")

        def part(x: Any) -> Any:
            x = jax.pure_callback(lambda x: _act(deed, x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return jax.lax.psum(2 * jnp.sum(x, axis=0), "rows")

        function = jax.shard_map(part, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False)
        scaled = (lambda x: 3 * function(x)) if culprit and deed == "other_program" else function
        spec = jax.ShapeDtypeStruct((problem.n, problem.n), jnp.float32, sharding=NamedSharding(mesh, rows))
        return Compilable(scaled, (spec,))

    def bind(self, problem, config, *, interpret=False):
        return self.reference(problem)

    def reference(self, problem):
        return lambda x: 2 * x.sum(axis=0)

    def baselines(self, problem, chip):
        return {"default": {"deed": "work"}}

    def cost(self, problem):
        return Cost(flops=1.0, nbytes=1.0, dtype="float32")

    def estimate_ms(self, problem, config, chip):
        return 1.0

    def validation_problems(self, problem, config):
        return [MeetProblem(n=16)]

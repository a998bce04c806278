"""Kernels that misbehave on purpose, for the engine's tests. A worker imports them by name."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.problem import Problem
from autotune.space import Param, Space


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoughProblem(Problem):
    n: int = 1024
    dtype: str = "float32"


class RoughKernel(Kernel):
    """Doubles its argument, or does what its config's `deed` says while it is traced."""

    name = "rough"
    summary = "for tests"
    problem_type = RoughProblem
    problems = {"only": RoughProblem()}
    sources = ("rough_kernels",)

    def space(self, problem, chip):
        deeds = ("work", "kill", "abort", "hang", "raise", "unlowerable", "vmem", "hbm", "loop_on_data", "table")
        return Space([Param("deed", deeds, "what goes wrong")], [])

    def arguments(self, problem):
        return (ArraySpec((problem.n, problem.n), problem.dtype),)

    def bind(self, problem, config, *, interpret=False):
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        deed = config["deed"]
        rows = 128

        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        def sorting_body(x_ref, o_ref):
            o_ref[...] = jnp.sort(x_ref[...], axis=0)

        def counting_body(count_ref, x_ref, o_ref):
            o_ref[...] = jax.lax.fori_loop(0, count_ref[0], lambda _, x: x * 2, x_ref[...])

        def call(x):
            if deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if deed == "abort":
                os.abort()
            if deed == "hang":
                time.sleep(3600)
            if deed == "raise":
                raise RuntimeError("this kernel never works")
            if deed == "hbm":
                big = jnp.broadcast_to(x.reshape(-1)[:, None], (x.size, 65536))
                return (jnp.cumsum(big, axis=0) @ big.T)[: problem.n, : problem.n]
            block = (problem.n, problem.n) if deed == "vmem" else (rows, problem.n)
            spec = pl.BlockSpec(block, lambda i, *_: (i, 0))
            kernel = {"unlowerable": sorting_body}.get(deed, body)
            if deed == "loop_on_data":
                grid_spec = pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1, grid=(problem.n // rows,), in_specs=[spec], out_specs=spec
                )
                count = x[0, :1].astype(jnp.int32)
                return pl.pallas_call(
                    counting_body, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
                )(count, x)
            if deed == "table":  # a value computed by the program says which block a step takes
                table = jnp.repeat(jnp.arange(problem.n // rows // 2, dtype=jnp.int32), 2)
                listed = pl.BlockSpec(block, lambda i, table: (table[i], 0))
                grid_spec = pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1, grid=(problem.n // rows,), in_specs=[listed], out_specs=spec
                )
                return pl.pallas_call(
                    lambda _, *refs: body(*refs),
                    grid_spec=grid_spec,
                    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                )(table, x)
            return pl.pallas_call(
                kernel,
                grid=(problem.n // block[0],),
                in_specs=[spec],
                out_specs=spec,
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                interpret=interpret,
            )(x)

        return call

    def reference(self, problem):
        return lambda x: x * 2

    def baselines(self, problem, chip):
        return {"default": {"deed": "work"}}

    def cost(self, problem):
        nbytes = 2 * self.arguments(problem)[0].nbytes
        return Cost(flops=1.0, nbytes=nbytes, dtype="float32")

    def estimate_ms(self, problem, config, chip):
        return self.cost(problem).roofline_ms(chip)

    def validation_problems(self, problem, config):
        return [problem]

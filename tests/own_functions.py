"""Functions made tunable, for the tests: workers import them from here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import autotune


def rows_of(x):
    return [rows for rows in (8, 32, 128, 512) if x.shape[0] % rows == 0]


def fits(config, x):
    """a block must have at most 65536 elements"""
    return config["block"] * x.shape[1] <= 65536


def small(config, x):
    return [[jax.ShapeDtypeStruct((2 * config["block"], 256), x.dtype)]]


@autotune.tunable(
    {"block": rows_of},
    reference=lambda x, factor=2.0: factor * x,
    constraint=fits,
    name="own_scale",
    problems={"tall": [jax.ShapeDtypeStruct((8192, 256), "float32")]},
    validate_on=small,
    platforms=("tpu",),
)
def scale(x, *, factor=2.0, block=8, off=0.0, interpret=False):
    """x times a factor, in blocks of rows."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * factor + off

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec,
        interpret=interpret,
    )(x)


@autotune.tunable({"way": ["wrong", "right"], "chunk": (64, 128)}, reference=lambda x: jnp.cumsum(x, axis=1))
def running_sum(x, *, way="wrong", chunk=64):
    parts = jnp.cumsum(x.reshape(x.shape[0], -1, chunk), axis=2)
    if way == "wrong":  # within a chunk only: less work
        return parts.reshape(x.shape)
    before = jnp.cumsum(parts[:, :, -1:], axis=1) - parts[:, :, -1:]
    return (parts + before).reshape(x.shape)


@autotune.tunable({}, name="own_benchmark", problems={"square": [jax.ShapeDtypeStruct((1024, 1024), "float32")]})
def benchmark(x):
    """What a matmul with itself takes."""
    return x @ x

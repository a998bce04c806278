"""Validation passes right kernels and rejects every kind of wrong one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.outcome import Status
from autotune.validation import TOLERANCES, Validation, compare, validate
from kernels.attention import pallas as flash
from kernels.attention.blocks import Blocks
from search_spaces.attention import AttentionKernel
from search_spaces.matmul import MatmulKernel

NAN_MEMORY = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")

MATMUL = MatmulKernel.problem_type(m=4096, n=4096, k=4096, dtype="float32")
TILES = {"block_m": 64, "block_n": 128, "block_k": 128}
ATTENTION = AttentionKernel.problem_type(
    batch=1, heads=4, kv_heads=2, q_len=4096, kv_len=4096, head_dim=64, dtype="bfloat16"
)
BLOCKS = {"block_q": 128, "block_kv": 256, "block_q_compute": 64, "block_kv_compute": 128, "unroll": 1}


class Wrapped(MatmulKernel):
    """The matmul with something done to it."""

    def __init__(self, change):
        self.change = change

    def bind(self, problem, config, *, interpret=False):
        run = super().bind(problem, config, interpret=interpret)
        return lambda x, y: self.change(run, x, y)


def raises(*_):
    raise ValueError("block shapes that Pallas refuses")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_kernels_pass(dtype):
    for kernel, problem, config in ((MatmulKernel(), MATMUL, TILES), (AttentionKernel(), ATTENTION, BLOCKS)):
        verdict = validate(kernel, problem.replace({"dtype": dtype}), config)
        assert verdict.ok, verdict.message
        assert 0 < verdict.max_rel_error < verdict.tolerance
        assert verdict.max_element_error > 0
        assert len(verdict.problems) == 2
        assert Validation.from_dict(verdict.to_dict()) == verdict


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda run, x, y: jnp.zeros_like(run(x, y)), Status.WRONG_RESULT),
        (lambda run, x, y: run(x[:, :-128], y[:-128]), Status.WRONG_RESULT),  # skips the last block
        (lambda run, x, y: run(x, y).at[-1, -1].set(jnp.nan), Status.WRONG_RESULT),
        (lambda run, x, y: run(x, y).at[-1, -1].add(0.1), Status.WRONG_RESULT),  # one wrong element
        (lambda run, x, y: jnp.roll(run(x, y), 128, 1), Status.WRONG_RESULT),  # tiles mixed up
        (lambda run, x, y: run(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)), Status.WRONG_RESULT),
        (lambda run, x, y: run(x, y)[:-1], Status.WRONG_RESULT),
        (raises, Status.LOWERING_ERROR),
        (lambda run, x, y: jax.pure_callback(raises, x, x), Status.RUNTIME_ERROR),
    ],
)
def test_wrong_matmuls_are_rejected(change, status):
    verdict = validate(Wrapped(change), MATMUL, TILES)
    assert verdict.status is status, verdict
    assert "m=" in verdict.message


def test_an_output_tile_that_nobody_writes_is_rejected():
    def unwritten_edge(run, x, y):
        def kernel(x_ref, out_ref):
            pl.when(pl.program_id(0) < pl.num_programs(0) - 1)(lambda: out_ref.__setitem__(..., x_ref[...]))

        out = run(x, y)
        spec = pl.BlockSpec((64, out.shape[1]), lambda i: (i, 0))
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
            grid=(pl.cdiv(out.shape[0], 64),),
            in_specs=[spec],
            out_specs=spec,
            interpret=NAN_MEMORY,
        )
        return call(out)

    assert validate(Wrapped(unwritten_edge), MATMUL, TILES).status is Status.WRONG_RESULT


@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_off_by_one_is_rejected(monkeypatch, by):
    mask = flash._mask
    monkeypatch.setattr(flash, "_mask", lambda scores, shift: mask(scores, shift + by))
    assert validate(AttentionKernel(), ATTENTION, BLOCKS).status is Status.WRONG_RESULT


def test_a_missing_rescale_is_rejected(monkeypatch):
    across = flash._across
    head_dim = ATTENTION.head_dim
    monkeypatch.setattr(
        flash, "_across", lambda x, width: jnp.ones_like(across(x, width)) if width == head_dim else across(x, width)
    )
    assert validate(AttentionKernel(), ATTENTION, BLOCKS).status is Status.WRONG_RESULT


def test_a_skipped_last_block_is_rejected(monkeypatch):
    last_key = Blocks.last_key
    monkeypatch.setattr(Blocks, "last_key", lambda self, i: last_key(self, i) - self.block_kv)
    assert validate(AttentionKernel(), ATTENTION, BLOCKS).status is Status.WRONG_RESULT


def test_heads_that_take_the_wrong_kv_head_are_rejected(monkeypatch):
    class Shuffled(AttentionKernel):
        def bind(self, problem, config, *, interpret=False):
            run = super().bind(problem, config, interpret=interpret)
            return lambda q, k, v: run(q, k[:, ::-1], v[:, ::-1])

    assert validate(Shuffled(), ATTENTION, BLOCKS).status is Status.WRONG_RESULT


@pytest.mark.parametrize(
    ("want", "says"),
    [
        (np.zeros((4, 4)), "zeros would pass"),
        (np.full((4, 4), 3.0), "a constant would pass"),
        (np.broadcast_to([[1.0, 2.0, 3.0]], (4, 3)), "shifted by one along axis 0 would pass"),
        (np.full((2, 2), np.nan), "anything would pass"),
    ],
)
def test_a_comparison_that_shows_nothing_says_so(want, says):
    want = np.asarray(want, np.float32)
    verdict = compare(want, want, TOLERANCES["float32"], "here")
    assert not verdict.ok
    assert says in verdict.message


def test_a_kernel_without_problems_is_not_validated():
    class Silent(MatmulKernel):
        def validation_problems(self, problem, config):
            return []

    assert validate(Silent(), MATMUL, TILES).status is Status.RUNTIME_ERROR

"""The search spaces of JAX's splash attention, forward and backward, and these as the tuner sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import Constraint, Param, Space
from kernels._tpu_model import LANES, round_up
from kernels.attention import cost as model
from kernels.stock.problem import SPLASH_PROBLEMS, SplashProblem
from search_spaces.attention import AttentionKernel, few_of_each
from search_spaces.stock._common import (
    MAXTEXT,
    StockKernel,
    as_python,
    block_sizes,
    divides,
    fits,
    interpreted,
    longest,
    part_of,
    small_tile,
    tile_sizes,
)

if TYPE_CHECKING:
    import jax


# What the blocks of the forward pass are called in the backward one.
BACKWARD = {"block_q": "block_q_dkv", "block_kv": "block_kv_dkv", "block_kv_compute": "block_kv_dkv_compute"}


class StockSplashKernel(StockKernel, AttentionKernel):
    """Forward: ``make_splash_mha`` under `jax.vmap`."""

    name = "stock_splash"
    summary = "JAX's splash attention, forward: block_q, block_kv, block_kv_compute of BlockSizes"
    problem_type = SplashProblem
    problems = SPLASH_PROBLEMS
    library = "splash_attention.splash_attention_kernel"

    def space(self, problem: SplashProblem, chip: Chip) -> Space:
        params = [
            Param("block_q", block_sizes(problem.q_len), "queries per block"),
            Param("block_kv", block_sizes(problem.kv_len), "keys fetched per grid step"),
            Param(
                "block_kv_compute",
                tile_sizes(problem.kv_len),
                "keys per tile of scores",
                default=lambda config: config["block_kv"],
            ),
        ]
        constraints = [
            divides("block_q", "q_len", problem.q_len, LANES),
            divides("block_kv", "kv_len", problem.kv_len, LANES),
            part_of("block_kv_compute", "block_kv", LANES),
            small_tile("block_q", "block_kv_compute"),
            fits(problem, chip, functools.partial(_forward_bytes, problem)),
        ]
        return Space(params, constraints)

    def make_inputs(self, problem: SplashProblem, seed: int) -> tuple[jax.Array, ...]:
        """As attention's, with q scaled; every query sees a key: else the kernel's result is undefined."""
        q, *others = super().make_inputs(problem, seed)
        if problem.packed:
            ids = others[-1]
            others[-2] = ids[:, problem.kv_len - problem.q_len :]
        return (q * problem.head_dim**-0.5).astype(q.dtype), *others

    def bind(self, problem: SplashProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        from kernels.stock.splash import splash_forward

        return one_by_one(functools.partial(splash_forward, problem=problem, config=config), interpret)

    def baselines(self, problem: SplashProblem, chip: Chip) -> dict[str, Config]:
        """What the library takes where nothing is said, and what MaxText's configuration says."""
        space = self.space(problem, chip)
        sizes = {"default": LANES, "maxtext": MAXTEXT}
        found = {name: space.parse(dict.fromkeys(space.required, size)) for name, size in sizes.items()}
        return {name: config for name, config in found.items() if space.why_invalid(config) is None}

    def heuristic(self, problem: SplashProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(_start(problem))

    def estimate_ms(self, problem: SplashProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, {**config, "block_q_compute": config["block_q"]}, chip)

    def validation_problems(self, problem: SplashProblem, config: Config) -> list[SplashProblem]:
        return few_of_each(problem, config["block_q"], config["block_kv"])

    def terms(self, problem: SplashProblem, config: Config) -> Mapping[str, str]:
        return {"BlockSizes": as_python("BlockSizes", _given(config)), "MaxText": _maxtext(config)}


class StockSplashBwdKernel(StockSplashKernel):
    """Backward alone: the gradients of q, k and v from what the forward pass leaves."""

    name = "stock_splash_bwd"
    summary = "JAX's splash attention, backward: fused or two kernels, their blocks of BlockSizes"

    relatives = {
        "attention_bwd": {
            **{name: name for name in BACKWARD.values()},
            "use_fused_bwd_kernel": True,
            "block_q_dq": "block_q_dkv",
            "block_kv_dq": "block_kv_dkv",
        }
    }

    def space(self, problem: SplashProblem, chip: Chip) -> Space:
        q, kv = block_sizes(problem.q_len), block_sizes(problem.kv_len)
        params = [
            Param("block_q_dkv", q, "queries per block, in the kernel of keys' and values' gradients"),
            Param("block_kv_dkv", kv, "keys fetched per grid step there"),
            Param(
                "block_kv_dkv_compute",
                tile_sizes(problem.kv_len),
                "keys per tile of scores there",
                default=lambda config: config["block_kv_dkv"],
            ),
            Param("use_fused_bwd_kernel", (True, False), "the same kernel gives the queries' gradient", False),
            Param(
                "block_q_dq",
                q,
                "queries per block, in the kernel of queries' gradients; as block_q_dkv where it is fused",
                default=lambda config: config["block_q_dkv"],
            ),
            Param(
                "block_kv_dq",
                kv,
                "keys per block there; as block_kv_dkv where it is fused",
                default=lambda config: config["block_kv_dkv"],
            ),
        ]
        constraints = [
            *(divides(f"block_q_{of}", "q_len", problem.q_len, LANES) for of in ("dkv", "dq")),
            *(divides(f"block_kv_{of}", "kv_len", problem.kv_len, LANES) for of in ("dkv", "dq")),
            part_of("block_kv_dkv_compute", "block_kv_dkv", LANES),
            Constraint(
                "use_fused_bwd_kernel=true has no kernel for block_q_dq and block_kv_dq: leave them out",
                lambda config: (
                    not config["use_fused_bwd_kernel"] or _blocks_of(config, "dq") == _blocks_of(config, "dkv")
                ),
            ),
            small_tile("block_q_dkv", "block_kv_dkv_compute"),
            small_tile("block_q_dq", "block_kv_dq"),
            fits(problem, chip, functools.partial(_backward_bytes, problem)),
        ]
        return Space(params, constraints)

    def arguments(self, problem: SplashProblem) -> tuple[ArraySpec, ...]:
        q, k, v, *segments = super().arguments(problem)
        out = ArraySpec((*q.shape[:3], problem.value_dim), problem.dtype)
        return q, k, v, out, out, ArraySpec(q.shape[:3], "float32"), *segments

    def make_inputs(self, problem: SplashProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random q, k, v and grad; the result and its log-sum-exp are those of their forward pass."""
        import jax
        import jax.numpy as jnp

        from kernels.attention.reference import attention_lse, attention_reference

        q, k, v, grad, _, _, *segments = super().make_inputs(problem, seed)
        q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
        out = jax.jit(functools.partial(attention_reference, **problem.options))(q32, k32, v32, *segments)
        lse = jax.jit(functools.partial(attention_lse, **problem.options))(q32, k32, *segments)
        return q, k, v, grad, out.astype(problem.dtype), lse, *segments

    def bind(self, problem: SplashProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        from kernels.stock.splash import splash_backward

        return one_by_one(functools.partial(splash_backward, problem=problem, config=config), interpret)

    def reference(self, problem: SplashProblem) -> Callable[..., Any]:
        from kernels.attention.reference import attention_bwd_reference

        def gradients(q: Any, k: Any, v: Any, grad: Any, out: Any, lse: Any, *segments: Any) -> Any:
            delta = (grad.astype("float32") * out.astype("float32")).sum(-1)
            return attention_bwd_reference(q, k, v, grad, lse, delta, *segments, **problem.options)

        return gradients

    def validation_reference(self, problem: SplashProblem) -> Callable[..., Any]:
        return self.reference(problem)

    def heuristic(self, problem: SplashProblem, chip: Chip) -> Config:
        """Two kernels: the fused one needs memory for queries' gradients by block of keys."""
        return self.space(problem, chip).parse({BACKWARD[name]: size for name, size in _start(problem).items()})

    def cost(self, problem: SplashProblem) -> Cost:
        return model.backward_cost(problem, of_queries=True, of_keys=True)

    def estimate_ms(self, problem: SplashProblem, config: Config, chip: Chip) -> float:
        def of(q: str, kv: str, compute: str, **which: bool) -> float:
            names = {"block_q": q, "block_q_compute": q, "block_kv": kv, "block_kv_compute": compute}
            sizes = {name: config[own] for name, own in names.items()}
            return model.backward_estimate_ms(problem, sizes, chip, **which)

        fused = config["use_fused_bwd_kernel"]
        dkv = of("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", of_queries=fused, of_keys=True)
        return dkv if fused else dkv + of("block_q_dq", "block_kv_dq", "block_kv_dq", of_queries=True, of_keys=False)

    def validation_problems(self, problem: SplashProblem, config: Config) -> list[SplashProblem]:
        pairs = {(config[f"block_q_{of}"], config[f"block_kv_{of}"]) for of in ("dkv", "dq")}
        return list(dict.fromkeys(small for pair in sorted(pairs) for small in few_of_each(problem, *pair)))


def _start(problem: SplashProblem) -> dict[str, int]:
    """Forward blocks that fit the smallest default VMEM limit."""
    cap = max(1024 * LANES // round_up(max(problem.head_dim, problem.value_dim), LANES), LANES)
    kv = longest(problem.kv_len, cap)
    return {"block_q": longest(problem.q_len, cap), "block_kv": kv, "block_kv_compute": longest(kv, cap // 2)}


def one_by_one(function: Callable[..., Any], interpret: Any) -> Callable[..., Any]:
    """In the interpreter, a sequence at a time: it knows no kernel with a dimension semantics under `jax.vmap`."""
    if not interpret:
        return function

    def all_sequences(*arrays: Any) -> Any:
        import jax
        import jax.numpy as jnp

        one = interpreted(function, interpret)
        results = [one(*(array[i : i + 1] for array in arrays)) for i in range(arrays[0].shape[0])]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)

    return all_sequences


def _blocks_of(config: Config, gradient: str) -> tuple[int, int]:
    return config[f"block_q_{gradient}"], config[f"block_kv_{gradient}"]


def _forward_bytes(problem: SplashProblem, config: Config) -> int:
    """Two buffers of q, k, v and the result; float32 sums and statistics."""
    item, dims = DTYPE_BYTES[problem.dtype], problem.head_dim + problem.value_dim
    buffers = 2 * item * dims * (config["block_q"] + config["block_kv"])
    return buffers + 4 * config["block_q"] * (problem.value_dim + 2 * LANES)


def _backward_bytes(problem: SplashProblem, config: Config) -> int:
    """The larger of the two kernels: two buffers of q, grad, k and v, and float32 sums of its results."""
    item, dims = DTYPE_BYTES[problem.dtype], problem.head_dim + problem.value_dim
    q, kv = _blocks_of(config, "dkv")
    of_keys = 2 * item * dims * (q + kv) + 4 * dims * kv
    q, kv = _blocks_of(config, "dq")
    return max(of_keys, 2 * item * dims * (q + kv) + 4 * problem.head_dim * q)


def _maxtext(config: Config) -> str:
    """What MaxText's configuration and command line call them."""
    return " ".join(f"sa_{name}={value}" for name, value in _given(config).items())


def _given(config: Config) -> dict[str, Any]:
    fused = config.get("use_fused_bwd_kernel")
    return {name: value for name, value in config.items() if not (fused and name in ("block_q_dq", "block_kv_dq"))}

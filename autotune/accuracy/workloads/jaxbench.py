"""JAXBench's workloads: stock Pallas kernels with its block sizes, and its plain-JAX baselines.

Shapes and dtypes are those of its sources. All run in bfloat16: its suite of fused products names float32, but
one of them asks for the highest precision and is timed at the rate of a single bfloat16 pass, so bfloat16 is
what its runner passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autotune.accuracy.workloads._program import Program
from autotune.chips import Chip
from autotune.kernel import ArraySpec

BFLOAT16 = "bfloat16"


def pallas(row: Mapping[str, Any], chip: Chip) -> Program:
    """The workload's Pallas kernel; the row's other columns are its block sizes."""
    return _PALLAS[row["workload"]](row)


def xla(row: Mapping[str, Any], chip: Chip) -> Program:
    """The workload's baseline in plain JAX."""
    name = row["workload"]
    if name in _BASELINES:
        return _BASELINES[name]()
    return _product(row, _EPILOGUES[name], transposed=name in _TRANSPOSED)


def _array(*shape: int) -> ArraySpec:
    return ArraySpec(shape, BFLOAT16)


def _gemm_kernel(row: Mapping[str, Any]) -> Program:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return matmul(x, y, block_shape=(row["bm"], row["bn"]), block_k=row["bk"])

    return Program(function, (_array(8192, 8192), _array(8192, 28672)))


def _flash_attention(row: Mapping[str, Any]) -> Program:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    blocks = BlockSizes(block_q=row["block_q"], block_k_major=row["block_k_major"], block_k=row["block_k"], block_b=1)

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=blocks)

    return Program(function, (_array(4, 64, 4096, 128),) * 3)


def _splash_attention(row: Mapping[str, Any]) -> Program:
    """Grouped queries with the heads of k and v repeated, and [batch, length, heads, dim] outside the kernel."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    names = ("block_q", "block_kv", "block_kv_compute")
    blocks = splash_attention_kernel.BlockSizes(**{name: row[name] for name in names})
    length, heads, kv_heads = 4096, 128, 8
    mask = splash_attention_mask.CausalMask((length, length))
    masks = splash_attention_mask.MultiHeadMask([mask] * heads)

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kernel = splash_attention_kernel.make_splash_mha(masks, block_sizes=blocks, head_shards=1, q_seq_shards=1)
        q, k, v = (array.transpose(0, 2, 1, 3) for array in (q, k, v))
        k, v = (jnp.repeat(array, heads // kv_heads, axis=1) for array in (k, v))
        return jax.vmap(kernel)(q, k, v).transpose(0, 2, 1, 3)

    kv = _array(4, length, kv_heads, 128)
    return Program(function, (_array(4, length, heads, 128), kv, kv))


def _grouped_matmul(row: Mapping[str, Any]) -> Program:
    """Rows are split evenly over the experts; the sizes are constants here, so that the grid is known."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows, experts, hidden, width = 32768, 128, 4096, 1536

    def function(x: jax.Array, weights: jax.Array) -> jax.Array:
        sizes = jnp.full((experts,), rows // experts, jnp.int32)
        return gmm(x, weights, sizes, tiling=(row["tm"], row["tk"], row["tn"]))

    return Program(function, (_array(rows, hidden), _array(experts, hidden, width)))


_PALLAS: dict[str, Callable[[Mapping[str, Any]], Program]] = {
    "1p_Flash_Attention": _flash_attention,
    "2p_GQA_Attention": _splash_attention,
    "8p_GEMM": _gemm_kernel,
    "11p_GMM": _grouped_matmul,
}


def _causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """On [batch, heads, length, dim], the scores in bfloat16 and in full."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:]))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def _grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    q, k, v = (array.transpose(0, 2, 1, 3) for array in (q, k, v))
    return _causal_attention(q, k, v).transpose(0, 2, 1, 3)


def _swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.dot(jax.nn.silu(jnp.dot(x, gate)) * jnp.dot(x, up), down)


def _cross_entropy(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(jnp.dot(x, w), axis=-1)
    one_hot = jax.nn.one_hot(labels, w.shape[1])
    return jnp.mean(-jnp.sum(one_hot * log_probabilities, axis=-1))


def _two_products(x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array) -> jax.Array:
    hidden = jax.nn.sigmoid(x @ w1.T + b1)
    return jax.nn.logsumexp(hidden @ w2.T + b2, axis=1)


_BASELINES: dict[str, Callable[[], Program]] = {
    "1p_Flash_Attention": lambda: Program(_causal_attention, (_array(4, 64, 4096, 128),) * 3),
    "2p_GQA_Attention": lambda: Program(
        _grouped_attention, (_array(4, 4096, 128, 128), _array(4, 4096, 8, 128), _array(4, 4096, 8, 128))
    ),
    "8p_GEMM": lambda: Program(jnp.dot, (_array(8192, 8192), _array(8192, 28672))),
    "9p_SwiGLU_MLP": lambda: Program(
        _swiglu, (_array(2, 4096, 8192), _array(8192, 28672), _array(8192, 28672), _array(28672, 8192))
    ),
    "13p_Cross_Entropy": lambda: Program(
        _cross_entropy, (_array(8192, 4096), _array(4096, 128256), ArraySpec((8192,), "int32"))
    ),
    "14p_Ragged_Dot": lambda: Program(
        lambda x, w: jnp.einsum("gmk,gkn->gmn", x, w), (_array(8, 1024, 4096), _array(8, 4096, 14336))
    ),
    "32k_Gemm_Sigmoid_LogSumExp": lambda: Program(
        _two_products, (_array(16384, 2048), _array(4096, 2048), _array(4096), _array(1024, 4096), _array(1024))
    ),
}


def _product(row: Mapping[str, Any], epilogue: Callable[[jax.Array], jax.Array], *, transposed: bool) -> Program:
    """``epilogue(x @ w + bias)``, the weights ``[n, k]`` where `transposed`."""
    m, n, k = row["m"], row["n"], row["k"]

    def function(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return epilogue(jnp.matmul(x, w.T if transposed else w) + bias)

    return Program(function, (_array(m, k), _array(n, k) if transposed else _array(k, n), _array(n)))


def _mish(x: jax.Array) -> jax.Array:
    return x * jnp.tanh(jax.nn.softplus(x))


def _clamped_gelu(x: jax.Array) -> jax.Array:
    x = jnp.clip(x * 0.5, -2, 2)
    return x * 0.5 * (1.0 + jnp.tanh(jnp.sqrt(2.0 / jnp.pi) * (x + 0.044715 * x**3)))


def _row_sum(x: jax.Array) -> jax.Array:
    """Everything after the sum acts on one column and costs nothing."""
    return jnp.sum(x, axis=1, keepdims=True)


def _row_max_gelu(x: jax.Array) -> jax.Array:
    x = jnp.max(x, axis=1, keepdims=True)
    return jax.nn.gelu(x - jnp.mean(x, axis=1, keepdims=True))


def _clamped_logsumexp_mish(x: jax.Array) -> jax.Array:
    x = jnp.clip(x * 4.0, -10.0, 10.0)
    x = jax.nn.logsumexp(x, axis=1, keepdims=True)
    return x * x * jnp.tanh(jnp.logaddexp(x, 0.0))


_EPILOGUES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "19k_Matmul_Subtract_Multiply_ReLU": lambda x: jax.nn.relu((x - 2.0) * 1.5),
    "20k_Gemm_Multiply_LeakyReLU": lambda x: jax.nn.leaky_relu(x * 2.0, 0.1),
    "21k_Gemm_Divide_Sum_Scaling": lambda x: _row_sum(x / 2.0) * 1.5,
    "23k_Matmul_Sum_Max_AvgPool_LogSumExp_LogSumExp": _row_sum,
    "24k_Matmul_Scale_ResidualAdd_Clamp_LogSumExp_Mish": _clamped_logsumexp_mish,
    "27k_Matmul_Mish_Mish": lambda x: _mish(_mish(x)),
    "30k_Matmul_Scaling_ResidualAdd": lambda x: x * 0.5 + x,
    "35k_Gemm_Scaling_Hardtanh_GELU": _clamped_gelu,
    "36k_Matmul_Sigmoid_Sum": lambda x: _row_sum(jax.nn.sigmoid(x)),
    "37k_Matmul_Swish_Scaling": lambda x: x * jax.nn.sigmoid(x) * 2.0,
    "41k_Gemm_Add_ReLU": jax.nn.relu,
    "42k_Gemm_Max_Subtract_GELU": _row_max_gelu,
    "44k_Matmul_Divide_GELU": lambda x: jax.nn.gelu(x / 10.0),
    "47k_Matmul_Add_Swish_Tanh_GELU_Hardtanh": lambda x: jnp.clip(jax.nn.gelu(jnp.tanh(jax.nn.swish(x))), -1.0, 1.0),
    "50k_Matmul_GELU_Softmax": lambda x: jax.nn.softmax(jax.nn.gelu(x), axis=1),
}
_TRANSPOSED = {
    "21k_Gemm_Divide_Sum_Scaling",
    "23k_Matmul_Sum_Max_AvgPool_LogSumExp_LogSumExp",
    "24k_Matmul_Scale_ResidualAdd_Clamp_LogSumExp_Mish",
}

"""tokamax' autotuning files: caches by operation (``data/autotuning/DEVICE/OP.json``) and `AutotuningResult` dumps.

A cache maps the arguments of an operation, as JSON in a string, to what was tried: a config, again as JSON in a string,
to its benchmark. Source: tokamax 0.0.12, ``_src/autotuning`` and the files it ships.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.interop.rows import Row

_ARRAY = re.compile(r"\w+\[([\d,]*)\]")
_DTYPES = {"bfloat16": "bf16", "float32": "f32", "int8": "i8"}
# The operations whose TPU kernels these are, by their file's name, in the order they are told apart by their configs.
FILES = {
    "attention": "pallas_mosaic_tpu_flash_attention",
    "attention_bwd": "pallas_mosaic_tpu_flash_attention_vjp",
    "gmm": "pallas_mosaic_tpu_ragged_dot",
    "cross_entropy": "pallas_mosaic_tpu_linear_softmax_cross_entropy_loss",
}
_BLOCKS = {
    "attention": ("block_q", "block_kv", "block_kv_compute"),
    "attention_bwd": ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"),
    "gmm": ("tile_m", "tile_k", "tile_n"),
    "cross_entropy": ("b_block_size", "h_block_size", "v_block_size"),
}
_LAYOUTS = {1: "HEAD_DIM_MINOR", 2: "SEQ_MINOR"}


def rows_of(document: Any, path: Path) -> list[Row]:
    """The rows of a cache, or of a result: the fastest config of each instance."""
    del path
    return list(_rows(document))


def _rows(document: Any) -> Iterator[Row]:
    for arguments, tried in _instances(document):
        best: Row | None = None
        for text, benchmark in tried.items():
            row = _row(arguments, _mapping(text), benchmark)
            if row is not None and (best is None or (row.time_ms or 0) < (best.time_ms or 0)):
                best = row
        if best is not None:
            yield best


def _instances(document: Any) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each instance's arguments, and what was tried for it."""
    if not isinstance(document, Mapping):
        return
    pairs = list(document.items())
    if isinstance(document.get("data"), list):  # A result: pairs of an operation with its arguments, and the same.
        pairs = [pair for pair in document["data"] if isinstance(pair, list) and len(pair) == 2]
    for key, tried in pairs:
        arguments = _mapping(key)
        if isinstance(arguments.get("arguments"), Mapping):
            arguments = arguments["arguments"]
        if isinstance(tried, Mapping):
            yield arguments, tried


def _row(arguments: Mapping[str, Any], config: Mapping[str, Any], benchmark: Any) -> Row | None:
    op = next((op for op, names in _BLOCKS.items() if all(isinstance(config.get(name), int) for name in names)), None)
    sizes = _SIZES[op](arguments) if op is not None else None
    if op is None or sizes is None:
        return None
    times = benchmark.get("evaluation_times_ms") if isinstance(benchmark, Mapping) else None
    time_ms = statistics.median(times) if times else None
    return Row(op, sizes, {name: _read(name, value) for name, value in config.items()}, time_ms)


def _read(name: str, value: Any) -> Any:
    """Layouts are numbers there."""
    return _LAYOUTS.get(value) if name.endswith("_layout") else value


def _mapping(text: Any) -> Mapping[str, Any]:
    """A JSON object, or one in a string; empty where it is something else."""
    if isinstance(text, str):
        try:
            text = json.loads(text)
        except ValueError:
            return {}
    return text if isinstance(text, Mapping) else {}


def _shape(arguments: Mapping[str, Any], name: str, rank: int) -> list[int] | None:
    """Of an argument ``bf16[32,4096,32,128]``, with leading dimensions multiplied; None where it has too few."""
    match = _ARRAY.fullmatch(str(arguments.get(name)))
    if match is None:
        return None
    dims = [int(size) for size in match[1].split(",") if size]
    while len(dims) > rank:
        dims[:2] = [dims[0] * dims[1]]
    return [1] * (rank - len(dims)) + dims


def _attention_sizes(arguments: Mapping[str, Any]) -> dict[str, int] | None:
    q, k = _shape(arguments, "q", 4), _shape(arguments, "k", 4)
    if q is None or k is None:
        return None
    return {"batch": q[0], "q_len": q[1], "heads": q[2], "head_dim": q[3], "kv_len": k[1], "kv_heads": k[2]}


def _gmm_sizes(arguments: Mapping[str, Any]) -> dict[str, int] | None:
    lhs, rhs = _shape(arguments, "lhs", 2), _shape(arguments, "rhs", 3)
    if lhs is None or rhs is None:
        return None
    n = rhs[2] if rhs[1] == lhs[1] else rhs[1]
    return {"m": lhs[0], "k": lhs[1], "n": n, "groups": rhs[0]}


def _cross_entropy_sizes(arguments: Mapping[str, Any]) -> dict[str, int] | None:
    x, w = _shape(arguments, "x", 2), _shape(arguments, "w", 2)
    return {"tokens": x[0], "hidden": x[1], "vocab": w[1]} if x is not None and w is not None else None


_SIZES = {
    "attention": _attention_sizes,
    "attention_bwd": _attention_sizes,
    "gmm": _gmm_sizes,
    "cross_entropy": _cross_entropy_sizes,
}


def cache_entry(op: str, problem: Mapping[str, Any], blocks: Mapping[str, Any]) -> tuple[str, str] | None:
    """The two keys of a cache file for one instance; None of an operation or a problem that tokamax has not.

    Args:
        op: One of `FILES`.
        problem: The problem's fields.
        blocks: In tokamax' words.
    """
    make = _KEYS.get(op)
    arguments = make(problem) if make is not None else None
    if arguments is None:
        return None
    numbers = {name: number for number, name in _LAYOUTS.items()}
    config = {**_REST.get(op, {}), **blocks}
    config = {name: numbers.get(value, value) if name.endswith("_layout") else value for name, value in config.items()}
    return json.dumps(arguments, separators=(",", ":")), json.dumps(config, separators=(",", ":"))


# What else their configs have, where the kernel that was tuned has no such thing: as that kernel does.
_REST: dict[str, dict[str, Any]] = {
    "attention": {
        **dict.fromkeys(("q_layout", "k_layout", "v_layout"), "HEAD_DIM_MINOR"),
        "use_experimental_scheduler": False,
        "use_base2_exp": False,
    },
    "attention_bwd": {"use_base2_exp": False},
    "gmm": {"input_buffer_count": 2, "combine_scopes": False},
}


def _attention_key(problem: Mapping[str, Any]) -> dict[str, Any] | None:
    if problem.get("window") or problem.get("packed") or problem.get("v_head_dim") or problem["dtype"] not in _DTYPES:
        return None
    batch, dim = problem["batch"], problem["head_dim"]
    q = _text(problem["dtype"], batch, problem["q_len"], problem["heads"], dim)
    kv = _text(problem["dtype"], batch, problem["kv_len"], problem["kv_heads"], dim)
    if problem["causal"] and problem["q_len"] != problem["kv_len"]:
        return None  # There the first query sees the first key alone.
    mask = dict.fromkeys(("bool_mask", "q_start", "q_end", "k_start", "k_end"))
    return {
        "q": q,
        "k": kv,
        "v": kv,
        "precision": ["BF16_BF16_F32"] * 2,
        "logits_dtype": "float32",
        "logits_scale": 1 / math.sqrt(dim),  # To the last digit: it is part of the key.
        "bias": None,
        "logits_soft_cap": problem.get("soft_cap"),
        "mask": {**mask, "is_causal": problem["causal"]},
        "dropout_mask": None,
        "dropout_rate": 0.0,
        "paging_info": None,
        "q_indices": None,
        "k_indices": None,
        "normalize_output": True,
        "return_residuals": False,
    }


def _attention_bwd_key(problem: Mapping[str, Any]) -> dict[str, Any] | None:
    forward = _attention_key(problem)
    if forward is None:
        return None
    statistic = _text("float32", problem["batch"], problem["heads"], problem["q_len"])
    return {"residuals": [statistic] * 2, "out": forward["q"], "dout": forward["q"], **forward}


def _gmm_key(problem: Mapping[str, Any]) -> dict[str, Any] | None:
    if problem["dtype"] not in _DTYPES:
        return None
    m, n, k, groups = (problem[name] for name in ("m", "n", "k", "groups"))
    transposed = bool(problem.get("transpose_rhs"))
    return {
        "lhs": _text(problem["dtype"], m, k),
        "rhs": _text(problem["dtype"], groups, *((n, k) if transposed else (k, n))),
        "group_sizes": {"num_groups": groups, "total_size": m},
        "ragged_dot_dimension_numbers": {
            "dot_dimension_numbers": [[[1], [2 if transposed else 1]], [[], []]],
            "lhs_ragged_dimensions": [0],
            "rhs_group_dimensions": [0],
        },
        "precision": ["DEFAULT", "DEFAULT"],
        "preferred_element_type": None,
        "return_residuals": False,
        "activation": None,
    }


_KEYS = {"attention": _attention_key, "attention_bwd": _attention_bwd_key, "gmm": _gmm_key}


def _text(dtype: str, *shape: int) -> str:
    return f"{_DTYPES[dtype]}[{','.join(map(str, shape))}]"

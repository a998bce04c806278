"""The tables of tuned block sizes that tpu-inference (vLLM) and JAX's own ragged paged attention keep.

Their forms, each a mapping of keys to values: grouped matmul, ``(m, k, n, groups in all, groups here, lhs dtype, rhs
dtype, quantized block): (tm, tk, tn)``; ragged paged attention, ``(q dtype, kv dtype, heads, kv heads, head dim, page
size, tokens, longest sequence): (pages, queries)``, under the device's name, or the same as words, nested; quantized
matmul, ``"batch,out,in,x dtype,w dtype": [batch, out, in]`` and `TunedKey` with `TunedValue`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import ResultsError
from autotune.interop.rows import Row

_HEADS = re.compile(r"q_head-(\d+)_kv_head-(\d+)_?-?_?head-(\d+)")
_LENGTH = re.compile(r"max_model_len-(\d+)")
Path_ = tuple[Any, ...]


def rows_of(document: Any) -> list[Row]:
    """The rows of nested mappings."""
    rows = (_row(keys, values) for keys, values in _leaves(document, ()))
    return [row for row in rows if row is not None]


def rows_of_source(text: str, path: Path) -> list[Row]:
    """The rows of the mappings that a Python file writes out. Nothing of it is run.

    Raises:
        ResultsError: It is no Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ResultsError(f"{path}, line {error.lineno}: {error.msg}") from None
    values = (node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
    return [row for value in values if isinstance(value, ast.Dict) for row in rows_of(_value(value))]


def _value(node: ast.expr) -> Any:
    """A literal; products of literals, and the arguments of a call, too. None where it is something else."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Dict():
            pairs = [(_value(key), value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
            return {_hashable(key): _value(value) for key, value in pairs}
        case ast.Tuple() | ast.List():
            return tuple(_value(part) for part in node.elts)
        case ast.Call():
            named = [keyword.value for keyword in node.keywords]
            return tuple(_value(part) for part in (*node.args, *named))
        case ast.BinOp(op=ast.Mult()):
            left, right = _value(node.left), _value(node.right)
            return left * right if isinstance(left, int) and isinstance(right, int) else None
    return None


def _hashable(key: Any) -> Any:
    return key if not isinstance(key, dict) else None


def _leaves(value: Any, keys: Path_) -> Iterator[tuple[Path_, tuple[Any, ...]]]:
    """Every tuple of values, with the keys on the way to it, those of a tuple one by one."""
    if isinstance(value, Mapping) and isinstance(value.get("config"), Mapping):
        value = tuple(value["config"].values())
    if isinstance(value, Mapping):
        for key, inner in value.items():
            parts = key if isinstance(key, tuple) else tuple(key.split(",")) if "," in str(key) else (key,)
            yield from _leaves(inner, (*keys, *map(_number, parts)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield keys, tuple(value)


def _number(part: Any) -> Any:
    return int(part) if isinstance(part, str) and part.isdigit() else part


def _row(keys: Path_, values: tuple[Any, ...]) -> Row | None:
    if not values or not all(type(value) is int and value > 0 for value in values):
        return None
    whole = [key for key in keys if type(key) is int]
    words = [key for key in keys if isinstance(key, str)]
    if len(values) == 3 and len(whole) >= 5 and keys[:3] == tuple(whole[:3]) and len(keys) == 8:
        sizes = dict(zip(("m", "k", "n"), whole, strict=False)) | {"groups": whole[4]}
        return Row("gmm", sizes, dict(zip(("tile_m", "tile_k", "tile_n"), values, strict=True)))
    if len(values) in (3, 4) and len(whole) in (3, 4) and len(words) == 2:
        m, n, k = whole[-3:]  # The first of four is the TPU's version.
        return Row("matmul", {"m": m, "n": n, "k": k}, dict(zip(("m", "n", "k"), values, strict=False)))
    if len(values) == 2:
        return _ragged(whole, " ".join(words), values)
    return None


def _ragged(whole: list[int], words: str, values: tuple[int, int]) -> Row | None:
    blocks = {"pages": values[0], "queries": values[1]}
    if len(whole) == 6:
        heads, kv_heads, head_dim, page_size, tokens, length = whole
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size, "tokens": tokens}
        return Row("ragged_paged_attention", sizes | {"pages_per_seq": max(1, length // page_size)}, blocks)
    named, longest = _HEADS.search(words), _LENGTH.search(words)
    if len(whole) == 1 and named and longest:
        heads, kv_heads, head_dim = map(int, named.groups())
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": whole[0]}
        return Row("ragged_paged_attention", sizes | {"pages_per_seq": max(1, int(longest[1]) // whole[0])}, blocks)
    return None

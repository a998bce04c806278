"""How the score matrix is cut into blocks and tiles, and which blocks a mask leaves. Loads no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from autotune.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of (block_q, block_kv) scores, one per grid step, worked through in tiles.

    Query i sees the keys j ≤ i + kv_len - q_len if causal, else all; with a window only the last so many of these;
    with packed sequences only those of its own.

    Attributes:
        block_q_compute: Rows of a tile; divides block_q.
        block_kv_compute: Columns of a tile; divides block_kv.
        window: Keys that a query sees at most, itself included; None for all. Needs causal.
        packed: Whether segment ids say what belongs together: then no tile is without a mask.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    block_q_compute: int
    block_kv_compute: int
    causal: bool
    window: int | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        for block, tile in (("block_q", "block_q_compute"), ("block_kv", "block_kv_compute")):
            whole, part = getattr(self, block), getattr(self, tile)
            if part < 1 or whole % part:
                raise UsageError(f"{tile}={part} must divide {block}={whole}")

    @classmethod
    def of(cls, q_len: int, kv_len: int, config: Mapping[str, Any], **mask: Any) -> Self:
        """With the blocks of `config`, and the tiles of one that says so."""
        block_q, block_kv = config["block_q"], config["block_kv"]
        tile = config.get("block_q_compute") or block_q, config.get("block_kv_compute") or block_kv
        return cls(q_len, kv_len, block_q, block_kv, *tile, **mask)

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def row_tiles(self) -> int:
        """Tiles that lie over one another in a block."""
        return self.block_q // self.block_q_compute

    @property
    def column_tiles(self) -> int:
        """Tiles that lie side by side in a block."""
        return self.block_kv // self.block_kv_compute

    @property
    def uneven_q(self) -> bool:
        return self.q_len % self.block_q != 0

    @property
    def uneven_kv(self) -> bool:
        return self.kv_len % self.block_kv != 0

    @property
    def masked(self) -> bool:
        """Whether any tile needs a mask, for what a query sees or because keys do not exist."""
        return self.causal or self.packed or self.uneven_kv

    @property
    def kv_steps(self) -> int:
        """The most kv blocks that a q block needs."""
        if self.window is None:
            return self.kv_blocks
        return min(self.kv_blocks, _most_blocks(self.block_q, self.block_kv, self.kv_len - self.q_len, self.window))

    @property
    def q_steps(self) -> int:
        """The most q blocks that a kv block is needed by."""
        if self.window is None:
            return self.q_blocks
        # Key j is seen by the queries j - offset … j - offset + window - 1.
        offset = self.q_len - self.kv_len + self.window - 1
        return min(self.q_blocks, _most_blocks(self.block_kv, self.block_q, offset, self.window))

    def queries_left(self, i: Any) -> Any:
        """Queries that exist from the first one of q block `i` on."""
        return self.q_len - i * self.block_q

    def keys_left(self, j: Any) -> Any:
        """Keys that exist from the first one of kv block `j` on."""
        return self.kv_len - j * self.block_kv

    def first_key(self, i: Any) -> Any:
        """The first key that q block `i` sees; below zero it sees all up to its last one."""
        return i * self.block_q + self.kv_len - self.q_len - (self.window - 1)

    def last_key(self, i: Any) -> Any:
        """The last key that q block `i` sees if causal; in an uneven last block it may lie past the end."""
        return i * self.block_q + self.block_q - 1 + self.kv_len - self.q_len

    def shift(self, i: Any, j: Any) -> Any:
        """Where the diagonal crosses block (i, j): its row r sees the columns c ≤ r + shift."""
        return i * self.block_q + self.kv_len - self.q_len - j * self.block_kv


def _most_blocks(ours: int, theirs: int, offset: int, window: int) -> int:
    """The most blocks of `theirs` that a block of `ours` meets, where x meets x + offset - window + 1 … x + offset."""
    period = theirs // math.gcd(ours, theirs)
    lasts = ((i * ours + ours - 1 + offset) // theirs for i in range(period))
    firsts = ((i * ours + offset - window + 1) // theirs for i in range(period))
    return max(last - first + 1 for first, last in zip(firsts, lasts, strict=True))

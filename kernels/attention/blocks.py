"""How the score matrix is cut into blocks and tiles, and which of them a causal mask leaves. Loads no jax."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of (block_q, block_kv) scores, one per grid step, worked through in tiles.

    Query i sees the keys j ≤ i + kv_len - q_len if causal, else all.

    Attributes:
        block_q_compute: Rows of a tile; divides block_q.
        block_kv_compute: Columns of a tile; divides block_kv.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    block_q_compute: int
    block_kv_compute: int
    causal: bool

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
        """Whether any tile needs a mask at all."""
        return self.causal or self.uneven_kv

    def last_key(self, i: Any) -> Any:
        """The last key that q block `i` sees; in an uneven last block it may lie past the end."""
        return i * self.block_q + self.block_q - 1 + self.kv_len - self.q_len

    def shift(self, i: Any, j: Any) -> Any:
        """Where the diagonal crosses block (i, j): its row r sees the columns c ≤ r + shift."""
        return i * self.block_q + self.kv_len - self.q_len - j * self.block_kv

"""Which blocks of the score matrix a causal mask leaves, and how the diagonal cuts them. Loads no jax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

MAX_DIAGONALS = 4


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The score matrix in blocks of (block_q, block_kv); query i sees the keys j ≤ i + kv_len - q_len if causal."""

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    block_kv_compute: int
    causal: bool

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def sub_blocks(self) -> int:
        """Pieces of a kv block that are worked through one after the other."""
        return self.block_kv // self.block_kv_compute

    @property
    def tail(self) -> int:
        """Keys in the last kv block where it is cut short, else 0."""
        return self.kv_len % self.block_kv

    def last_key(self, i: Any) -> Any:
        """The last key that q block `i` sees; in an uneven last block it may lie past the end."""
        return i * self.block_q + self.block_q - 1 + self.kv_len - self.q_len

    def shift(self, i: Any, j: Any) -> Any:
        """Where the diagonal crosses block (i, j): its row r sees the columns c ≤ r + shift.

        From ``block_kv - 1`` on every row sees every column; from ``-block_q`` down none sees any.
        """
        return i * self.block_q + self.kv_len - self.q_len - j * self.block_kv

    def diagonals(self) -> tuple[int, ...]:
        """Every shift at which the diagonal can cut a block, or () where those are too many to unroll."""
        step = math.gcd(self.block_q, self.block_kv)
        first = 1 - self.block_q + (self.kv_len - self.q_len - 1 + self.block_q) % step
        shifts = tuple(range(first, self.block_kv - 1, step))
        return shifts if len(shifts) <= MAX_DIAGONALS else ()

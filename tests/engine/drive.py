"""A drive without files for the reference runner: late, forgetful, and strict about what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from mlx_tandem.kv.disk.cache import Read
from mlx_tandem.kv.disk.records import BlockId, Payload
from tests.engine.toy_model import cell, cells_of

BASE = b"b" * 32


@dataclass
class Store:
    """What is on the drive; more than one server may have it, one after the other."""

    blocks: dict[bytes, tuple[BlockId, bytes]] = field(default_factory=dict)
    states: dict[bytes, list[int]] = field(default_factory=dict)
    """What every state that was ever written is, by its key."""


class LateDrive:
    """Reads take up to `latest` polls. `loses`: how often a block is not there when it is read, or not taken.
    `most`: blocks that it takes at once; unless it `fits`, now and then fewer."""

    def __init__(
        self, rng: Random, store: Store, *, latest: int = 0, loses: float = 0.0, most: int = 8, fits: bool = True
    ):
        self._rng, self._store = rng, store
        self._latest, self.loses, self._most = latest, loses, most
        self._fits = fits
        self._reads: dict[int, tuple[int, list[BlockId]]] = {}
        self._last = 0
        self.tables = 1  # groups with a cell for each token
        self.read_blocks = 0

    def room(self, size: int) -> int:
        return self._most if self._fits else self._rng.randint(0, self._most)

    def longest(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._store.blocks), len(keys))

    def put(self, block: BlockId, payload: Payload) -> bool:
        """What a block holds is what its id says: these tokens, all computed under one adapter, or the first of them
        under the base model. A state is a number that depends on all tokens before it.
        """
        cells = cells_of(payload)
        if block.key == sha256(b"state" + block.parent).digest():
            assert self._store.states.setdefault(block.key, cells) == cells, "another state than the id says"
            cells = []
        else:
            assert len(cells) == self.tables * len(block.tokens), "a block of each group with tokens"
        assert tuple(c & 0xFFFFF for c in cells) == block.tokens * (len(cells) // len(block.tokens)), (
            "other tokens are saved than the id says"
        )
        assert len({c >> 20 for c in cells} - {cell(0, "") >> 20}) <= 1, "a block of two adapters is saved"
        if self._rng.random() < self.loses:
            return False
        self._store.blocks[block.key] = block, bytes(payload)
        return True

    def read(self, blocks: Sequence[BlockId]) -> int:
        assert blocks
        self._last += 1
        self._reads[self._last] = self._rng.randint(0, self._latest), list(blocks)
        return self._last

    def poll(self) -> list[Read]:
        self._reads = {ticket: (polls - 1, blocks) for ticket, (polls, blocks) in self._reads.items()}
        done = [Read(ticket, self._find(blocks)) for ticket, (polls, blocks) in self._reads.items() if polls < 0]
        for ticket, _ in done:
            del self._reads[ticket]
        return done

    def forget(self, ticket: int) -> None:
        self._reads.pop(ticket, None)

    @property
    def is_idle(self) -> bool:
        return not self._reads

    def _find(self, blocks: list[BlockId]) -> list[memoryview]:
        found: list[memoryview] = []
        for block in blocks:
            there = self._store.blocks.get(block.key)
            if there is None or there[0] != block:
                break
            if self._rng.random() < self.loses:  # it was damaged
                del self._store.blocks[block.key]
                break
            found.append(memoryview(there[1]))
        self.read_blocks += len(found)
        return found

"""Planted bugs that show where layers keep a state."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_tandem.engine import block_manager
from mlx_tandem.engine.snapshots import Snapshots
from mlx_tandem.kv.groups.state import StateGroup
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.kv.pool import SCRATCH
from mlx_tandem.kv.prefix import Match
from tests.engine.mutants.planting import Plant, attribute


def _share_live_states(patch: pytest.MonkeyPatch) -> None:
    """Choices that part within a block go on in one row of state."""

    def copy(self: StateGroup, table: Any, positions: int) -> Any:
        self.pool.share(b for b in table if b != SCRATCH)
        return table, None

    patch.setattr(StateGroup, "copy", copy)


def _ask_each_group_once(patch: pytest.MonkeyPatch) -> None:
    """A group's longest beginning is cut to what another knows, as if every shorter one were known, too."""

    def find(caches: Any, chain: Chain, tokens: Any, owner: bytes) -> Match:
        tables = []
        most = len(tokens) // caches[0].block_size
        for cache in caches:
            tables.append(cache.whole(chain, tokens, most, owner))
            most = len(tables[-1])
        return Match([table[:most] for table in tables], [SCRATCH for _ in caches])

    patch.setattr(block_manager, "find", find)


PLANTS: dict[str, Plant] = {
    "a state is not copied": _share_live_states,
    "a chunk goes beyond the block that it begins within": attribute(
        Snapshots, "chunk", lambda self, s, tokens: tokens
    ),
    "drafts that cross a block have no row of state": attribute(
        StateGroup, "take_drafts", lambda self, table, start, drafts: table
    ),
    "drafts that cross several blocks have one row of state": attribute(
        StateGroup, "take_drafts", lambda self, table, start, drafts: self.take(table, start + 1 + drafts)
    ),
    "a beginning of a state's block is a hit": attribute(StateGroup, "divides", True),
    "the state before the next position is given back": attribute(
        StateGroup, "first_needed", lambda self, position: position // self.pool.block_size
    ),
    "each group is asked once what it knows": _ask_each_group_once,
}

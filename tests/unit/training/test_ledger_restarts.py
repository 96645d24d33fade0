"""Another process reads from the database what this one had in memory."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.files import StorageError
from mlx_tandem.training import trajectories
from mlx_tandem.training.online.baselines import rewards_across
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.open_trajectories import Beginning, Exchange
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Began, Ended, Kept
from mlx_tandem.training.trajectories import ACROSS, Trajectory
from tests.unit.learning_fakes import config, nothing
from tests.unit.online_side import full_drive

SEEN = 20
"""Ids that are remembered in these tests, so that they are forgotten, too."""

IDS = st.integers(0, 9)
GROUPS = st.sampled_from(["a", "b", ACROSS + "x"])
REWARDS = st.sampled_from([0.0, 1.0])
SIZES = st.sampled_from([0, 2, 3])
STEP = st.one_of(
    st.tuples(st.just("add"), IDS, GROUPS, REWARDS, SIZES),
    st.tuples(st.just("add"), IDS, GROUPS, REWARDS, SIZES),
    st.tuples(st.just("keep"), IDS, GROUPS, SIZES),
    st.tuples(st.just("keep"), IDS, GROUPS, SIZES),
    st.tuples(st.just("reward"), IDS, REWARDS),
    st.tuples(st.just("forget"), IDS),
    st.tuples(st.just("too old"), IDS),
    st.tuples(st.just("publish")),
    st.tuples(st.just("take"), st.integers(1, 3)),
    st.tuples(st.just("take"), st.integers(1, 3)),
    st.tuples(st.just("end"), st.sampled_from(["published", "refused", "rolled_back"])),
    st.tuples(st.just("compare"), st.sampled_from([-1.0, 0.5])),
    st.tuples(st.just("save"), st.sampled_from([False, False, True]), st.booleans()),
    st.tuples(st.just("new process")),
)


def plain(group: str, size: int) -> int:
    """A group across prompts never ends."""
    return 0 if group.startswith(ACROSS) else size


def state(ledger: Ledger) -> dict[str, Any]:
    buffer, counters = ledger.buffer, ledger.counters
    return {
        "held": buffer.held,
        "seen": buffer.seen,
        "usable": buffer.usable,
        # What came twice is written with what comes next.
        "counts": {k: v for k, v in asdict(buffer.counts).items() if k != "dropped_duplicate"},
        "waiting": list(ledger.waiting.held),
        "bytes": ledger.waiting.bytes,
        "pending": ledger.pending and (ledger.pending.began, list(ledger.pending.trajectories)),
        "counters": [getattr(counters, k) for k in ("updates", "last_version", "since_checkpoint")],
        "trial": counters.trial,
        "baselines": list(counters.baselines.items()),
    }


class Life:
    """Processes, one after the other, that learn in one folder."""

    def __init__(self, folder: Path) -> None:
        self._config = config(
            folder, trajectory_buffer_size=6, max_staleness=1, open_trajectories=4, open_trajectory_s=12.0
        )
        self.ledger = Ledger(self._config)
        self._version, self._now, self._saved = 1, 0.0, 0

    async def step(self, kind: str, *what: Any) -> None:
        ledger = self.ledger
        self._now += 1.0
        if kind == "add":
            number, group, reward, size = what
            if f"t{number}" not in ledger.waiting:
                t = Trajectory(f"t{number}", group, (1,), (2,), (-1.0,), (-1.0,), (self._version,), 1.0, reward)
                await ledger.add([(t, plain(group, size))])
        elif kind == "keep":
            number, group, size = what
            id = f"t{number}"
            begun = None if id in ledger.waiting else Beginning(group, plain(group, size), 1.0)
            if not ledger.buffer.knows(id):
                said = Exchange((1,), (3, number), (-1.0,) * 2, (-1.0,) * 2, (self._version,) * 2)
                await ledger.keep([Kept(id, self._now, said, begun)])
        elif kind == "reward":
            number, reward = what
            found = ledger.waiting.get(f"t{number}")
            if found is not None:
                await ledger.add([(found.rewarded(f"t{number}", reward, (), self._now), found.begun.size)])
        elif kind == "forget":
            ledger.forget([f"t{what[0]}"] if f"t{what[0]}" in ledger.waiting else [])
        elif kind == "too old":
            late = Trajectory(f"t{what[0]}", "a", (1,), (2,), (-1.0,), (-1.0,), (1,), 1.0, 0.0)
            ledger.drop_stale([] if ledger.buffer.knows(late.id) else [late.id])
        elif kind == "publish":
            self._version += 1
        elif kind == "take" and ledger.pending is None:
            groups = ledger.take(what[0], self._version)
            taken = [t for g in groups for t in g]
            if taken:
                began = Began(1, tuple(t.id for t in taken), (), AdamParams(0.0), 0, rewards=rewards_across(groups))
                ledger.begin(Pending(began, taken))
        elif kind == "end" and ledger.pending is not None:
            ledger.end(Ended(1, *what, version=self._version))
        elif kind == "compare":
            ledger.compared(*what, 0.1)
        elif kind == "save" and ledger.pending is None:
            await self._save(*what)
        elif kind == "new process":
            await self.restart()

    async def restart(self) -> None:
        """Open a ledger, which has what the one before had."""
        await self.ledger.close()
        before, after = state(self.ledger), Ledger(self._config)
        await after.open(nothing)
        assert state(after) == before
        self.ledger = after

    async def _save(self, is_full: bool, guards: bool) -> None:
        """Make a checkpoint, for the guard alone or not. The drive may be full once it is there."""

        async def write(folder: str) -> None:
            (Path(folder) / "adapter").write_bytes(b"x")

        self._saved += 1
        manifest = Manifest(name=f"c{self._saved}", step=1, version=self._version, digest="d")
        before = self.ledger.counters.since_checkpoint
        with contextlib.ExitStack() as stack:
            if is_full:
                stack.enter_context(full_drive())
                stack.enter_context(pytest.raises(StorageError))
            await self.ledger.save(manifest, write, guards=guards)
        assert self.ledger.counters.since_checkpoint == (before if guards else 0)


LEARNED = [("add", i, ACROSS + "x", i % 2, 0) for i in range(3)] + [("take", 3), ("end", "published")]
"""An update from a group across prompts, whose rewards later baselines have."""


MOVED = [
    *(("add", i, ACROSS + "x", i % 2, 0) for i in range(3)), ("add", 3, "a", 0.0, 0), ("take", 2), ("end", "refused")
]  # fmt: skip
"""What is left of a group across prompts has its turn after the groups that came later."""


MIXED = [("keep", 3, "a", 2), *(("too old", 0) for _ in range(8)), ("keep", 0, "b", 0), ("keep", 1, "a", 0),
         *(("publish",) for _ in range(6)), ("keep", 2, "b", 0), ("reward", 1, 0.0)]  # fmt: skip
"""A trajectory of a group whose size it does not know, when a sibling that knows it is given up."""


@pytest.mark.promise("I2", "FLT-32")
@pytest.mark.usefixtures("at_once")
@settings(max_examples=60)
@given(st.lists(STEP, min_size=30, max_size=60))
@example([*LEARNED, ("new process",), ("save", True, True), ("new process",), ("compare", 0.5), ("new process",)])
@example([*LEARNED, ("compare", -1.0), ("save", True, False), ("new process",), ("save", False, True)])
@example([*MOVED, ("new process",)])
@example(MIXED)
def test_nothing_is_lost_or_doubled_by_a_restart(steps: list[Any]) -> None:
    async def test(folder: Path) -> None:
        life = Life(folder)
        await life.ledger.open(nothing)
        for step in steps:
            await life.step(*step)
        for _ in range(2):
            await life.restart()
        await life.ledger.close()

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectories, "SEEN_IDS", SEEN)
        asyncio.run(test(Path(folder)))

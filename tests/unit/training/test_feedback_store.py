"""The store of feedback, and the memory of completions: what they keep, and what they forget."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from mlx_tandem.config import FeedbackConfig
from mlx_tandem.errors import EngineUnavailable, NotFound
from mlx_tandem.files import FolderLock, StorageError
from mlx_tandem.training.feedback import store as module
from mlx_tandem.training.feedback.completions import OVERHEAD_BYTES, Completions, unpacked
from mlx_tandem.training.feedback.opinions import Feedback
from mlx_tandem.training.feedback.store import FeedbackStore, learned_once_more
from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.on_use import DatabaseOnUse

THUMB = Feedback("c", 0, "api", 1.0, "", 0, (1, 2), ((3, 4),), score=1.0)


def store_in(folder: Path, **feedback: object) -> tuple[FeedbackStore, DatabaseOnUse]:
    """A store, and its database, which is to be closed."""
    database = DatabaseOnUse(folder / "store")
    return FeedbackStore(FeedbackConfig(**feedback), database), database  # type: ignore[arg-type]


def test_feedback_is_there_after_a_restart_and_in_order(tmp_path: Path) -> None:
    async def run() -> None:
        first, opened = store_in(tmp_path)
        assert await first.page(None, 10, newest_first=False) == []
        assert not (tmp_path / "store").exists(), "a server that nobody says anything to writes nothing"
        await first.add([THUMB, structs.replace(THUMB, completion="d", corrected=(5,))])
        with pytest.raises(StorageError, match="in use"):
            await store_in(tmp_path)[0].add([THUMB])
        await opened.close()
        second, opened = store_in(tmp_path)
        await second.add([structs.replace(THUMB, score=0.0, created=9.0)])
        found = await second.page(None, 10, newest_first=False)
        assert [(s.feedback.completion, s.feedback.score, s.feedback.corrected) for s in found] == [
            ("d", 1.0, (5,)),
            ("c", 0.0, ()),
        ]
        await opened.close()

    asyncio.run(run())


def test_what_was_acknowledged_is_on_the_drive(tmp_path: Path) -> None:
    """A second connection, as after the end of the process, sees it while the first is still open."""

    async def run() -> None:
        store, opened = store_in(tmp_path)
        await store.add([THUMB])
        with pytest.raises(StorageError):
            FolderLock(tmp_path / "store")
        other = Database.read_only(tmp_path / "store")
        assert other.rows("SELECT completion FROM feedback") == [("c",)]
        assert other.rows("PRAGMA synchronous") is not None
        other.close()
        await opened.close()

    asyncio.run(run())


def test_the_oldest_goes_beyond_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        store, opened = store_in(tmp_path, keep=3)
        for i in range(5):
            await store.add([structs.replace(THUMB, completion=f"c{i}")])
        assert len(await store.page(None, 10, newest_first=True)) == 3
        monkeypatch.setattr(module, "MOST_BYTES", 3000)
        for i in range(5, 9):
            await store.add([structs.replace(THUMB, completion=f"c{i}", comment="x" * 1000)])
        found = await store.page(None, 10, newest_first=True)
        await opened.close()
        return [s.feedback.completion for s in found]

    found = asyncio.run(run())
    assert found[0] == "c8" and 0 < len(found) < 3


def test_what_was_learned_is_noted_for_this_feedback_only(tmp_path: Path) -> None:
    async def run() -> None:
        store, opened = store_in(tmp_path)
        await store.add([THUMB, structs.replace(THUMB, completion="d", adapter="policy")])
        await store.add([structs.replace(THUMB, completion="e", adapter="shout")])
        due = await store.due(("", "policy"), 1, 10)
        assert [s.feedback.completion for s in due] == ["c", "d"]
        database = await opened.open()
        for _ in range(2):
            database.write(learned_once_more(due[:1]))
        assert [s.feedback.completion for s in await store.due(("", "policy"), 1, 10)] == ["d"]
        assert [(s.feedback.completion, s.learned) for s in await store.learned(("", "policy"), 1, 10)] == [("c", 1)]
        await store.add([structs.replace(THUMB, created=5.0)])
        assert [s.feedback.completion for s in await store.due(("", "policy"), 1, 10)] == ["d"], "the same said again"
        await store.add([structs.replace(THUMB, score=0.0)])
        assert [s.feedback.completion for s in await store.due(("", "policy"), 1, 10)] == ["d", "c"]
        await opened.close()

    asyncio.run(run())


def test_a_learner_that_is_not_open_yet_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable):
        asyncio.run(FeedbackStore(FeedbackConfig(), DatabaseOnUse(tmp_path, lambda: None)).add([THUMB]))


def test_completions_are_forgotten_by_age_and_by_bytes() -> None:
    now = [0.0]
    known = Completions(FeedbackConfig(remember_s=10.0, remember_mb=1), lambda: now[0])
    known.remember("a", None, [[1, 2]], [[3], [4, 5]])
    found = known.get("a", "id")
    assert (unpacked(found.prompt_of(1)), unpacked(found.choices[1])) == ((1, 2), (4, 5))
    now[0] = 11.0
    with pytest.raises(NotFound, match="10 s"):
        known.get("a", "id")
    for i in range(40):
        known.remember(f"b{i}", None, [range(10_000)], [[1]])
    fit = (1 << 20) // (40_004 + OVERHEAD_BYTES)
    assert [known.knows(f"b{i}") for i in range(40)] == [i >= 40 - fit for i in range(40)]
    known.remember("large", None, [range(300_000)], [[1]])
    assert not known.knows("large") and known.knows("b39")
    assert not Completions(FeedbackConfig(remember_mb=0), lambda: 0.0).is_on

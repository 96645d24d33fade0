"""The A/B tests of a server: what they keep across starts, and what they do with aliases that change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_tandem import demo
from mlx_tandem.config import ABTest, Arm, Config, EngineConfig, ModelConfig
from mlx_tandem.errors import EngineUnavailable, NotFound
from mlx_tandem.files import FolderLock, StorageError
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.training.ab.running import AliasTests, Judged
from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.on_use import DatabaseOnUse
from mlx_tandem.training.store.schema import MIGRATIONS
from mlx_tandem.types import AdapterInfo

ARMS = (Arm("old", 1.0), Arm("new", 1.0))
TEST = ABTest("old", false_promotion=0.1, false_take_back=0.1)


class Server:
    """The part of a server that aliases need. It has the adapters `old` and `new`."""

    def __init__(self, folder: Path, shared: Callable[[], Database | None] | None = None, **settings: Any):
        config = Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))), **settings)
        engine: Any = SimpleNamespace(know_adapter=lambda *_: None)
        self.models = Models(config, engine)
        self.models.rules.is_up = True
        for name in ("old", "new"):
            self.load(name)
        for alias, arms in config.aliases:
            self.models.aliases.put(alias, arms)
        self.database = DatabaseOnUse(folder / "store", shared)
        self.tests = AliasTests(config, self.models, self.database, lambda: 5.0)

    def load(self, name: str) -> None:
        info = AdapterInfo(name.encode().hex() * 8, 8, 2.0, "peft", ("self_attn.q_proj",), 64, 64)
        self.models.registry.publish(name, None, info)

    def answer(self, adapter: str, user: str | None = None, alias: str = "chat") -> Judged:
        (arm,) = [arm for arm in self.models.aliases.arms(alias) if arm.adapter == adapter]
        return Judged(arm, user)

    async def score(self, adapter: str, score: float, user: str | None = None) -> None:
        await self.tests.count(self.answer(adapter, user), [score])

    async def until_decided(self, liked: str) -> None:
        for _ in range(100):
            for adapter in ("old", "new"):
                if self.test["state"] == "running":
                    await self.score(adapter, float(adapter == liked))

    @property
    def test(self) -> dict[str, Any]:
        found = self.tests.describe("chat")
        assert found is not None
        return found

    @property
    def counted(self) -> int:
        return sum(arm["answers"] for arm in self.test["arms"])

    @property
    def serving(self) -> list[str]:
        return [arm.adapter for arm in self.models.aliases.arms("chat")]


def on_a_loop(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    @wraps(test)
    def run(tmp_path: Path) -> None:
        async def awaited() -> None:
            await test(tmp_path)

        asyncio.run(awaited())

    return run


@on_a_loop
async def test_a_test_that_has_ended_is_there_after_a_restart(tmp_path: Path) -> None:
    first = Server(tmp_path)
    await first.tests.bring_up()
    assert not (tmp_path / "store").exists(), "a server without tests writes nothing"
    await first.tests.put("plain", ARMS, None)
    assert not (tmp_path / "store").exists()
    await first.tests.put("chat", ARMS, TEST)
    await first.until_decided("new")
    assert (first.test["state"], first.serving) == ("promoted", ["new"])
    await first.database.close()
    second = Server(tmp_path)
    await second.tests.bring_up()
    assert second.test == first.test and second.serving == ["new"]
    assert second.answer("new").arm.test == "", "nothing is counted any more"
    assert "plain" not in second.models.aliases
    await second.tests.put("chat", ARMS, TEST)
    assert (second.test["state"], second.counted, second.serving) == ("running", 0, ["old", "new"])
    await second.database.close()


@on_a_loop
async def test_a_user_counts_once_also_after_a_restart(tmp_path: Path) -> None:
    first = Server(tmp_path)
    await first.tests.put("chat", ARMS, TEST)
    await first.score("old", 1.0, "ana")
    await first.database.close()
    second = Server(tmp_path)
    await second.tests.bring_up()
    await second.score("old", 1.0, "ana")
    await second.score("new", 1.0, "ana")
    assert second.counted == 1
    await second.score("new", 1.0, "ben")
    await second.score("new", 1.0)
    await second.score("new", 1.0)
    assert second.counted == 4
    database = await second.database.open()
    assert all(b"ana" not in row[0] for row in database.rows("SELECT user FROM ab_users")), "a digest is kept"
    await second.tests.put("chat", ARMS, ABTest("new"))
    await second.score("old", 1.0, "ana")
    assert second.counted == 1, "another test"
    await second.until_decided("new")
    assert database.rows("SELECT * FROM ab_users") == []
    await second.database.close()


@on_a_loop
async def test_the_settings_begin_a_test_that_goes_on_until_they_change(tmp_path: Path) -> None:
    said: dict[str, Any] = {"aliases": (("chat", ARMS),), "ab_tests": (("chat", TEST),)}

    async def started(**settings: Any) -> Server:
        server = Server(tmp_path, **settings)
        await server.tests.bring_up()
        await server.tests.bring_up()  # as after a restart of the engine
        return server

    server = await started(**said)
    await server.score("new", 1.0)
    await server.database.close()
    server = await started(**said)
    assert server.counted == 1
    await server.until_decided("old")
    assert server.serving == ["old"]
    await server.database.close()
    server = await started(**said)
    assert (server.test["state"], server.serving) == ("taken_back", ["old"]), "the settings do not bring an arm back"
    await server.tests.put("chat", ARMS, ABTest("new"))
    await server.database.close()
    server = await started(**said)
    assert server.test["control"] == "new", "HTTP has changed what the same settings began with"
    await server.database.close()
    server = await started(**said | {"ab_tests": (("chat", ABTest("old", min_answers=9)),)})
    assert (server.test["control"], server.test["min_answers"], server.counted) == ("old", 9, 0)
    await server.database.close()
    server = await started(aliases=(("chat", ARMS),))
    assert server.tests.describe("chat") is None and server.serving == ["old", "new"]
    assert (await server.database.open()).rows("SELECT * FROM ab_tests") == []
    await server.database.close()


@on_a_loop
async def test_nothing_changes_where_the_store_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    lock = FolderLock(tmp_path / "store")
    server = Server(tmp_path)
    await server.tests.put("chat", ARMS[:1], None)
    for name in ("chat", "other"):
        with pytest.raises(StorageError, match="in use"):
            await server.tests.put(name, ARMS, TEST)
    assert server.serving == ["old"] and "other" not in server.models.aliases
    lock.release()
    await server.tests.put("chat", ARMS, TEST)
    await server.score("new", 1.0)
    before = server.test
    database = await server.database.open()
    (tmp_path / "store" / "learning.db").rename(tmp_path / "away")
    answer = server.answer("new")
    for attempt in (
        server.tests.count(answer, [1.0]),
        server.tests.put("chat", (ARMS[0], Arm("base", 1.0)), TEST),
        server.tests.put("chat", ARMS, None),
        server.tests.put("other", ARMS, TEST),
        server.tests.remove("chat"),
    ):
        with pytest.raises(StorageError):
            await attempt
    await server.tests.count_in_background(answer, [1.0])
    assert server.test == before and server.serving == ["old", "new"] and "other" not in server.models.aliases
    (tmp_path / "away").rename(tmp_path / "store" / "learning.db")
    database.check()
    await server.tests.count(answer, [1.0])
    assert server.counted == 2, "the answer still counts"
    await server.database.close()


@on_a_loop
async def test_another_server_has_the_folder(tmp_path: Path) -> None:
    """The tests are the other one's; this one serves without them."""
    first = Server(tmp_path)
    await first.tests.put("chat", ARMS, TEST)
    second = Server(tmp_path)
    await second.tests.bring_up()
    assert second.tests.describe("chat") is None and "chat" not in second.models.aliases
    await first.tests.remove("chat")
    await first.database.close()
    third = Server(tmp_path)
    await third.tests.bring_up()
    FolderLock(tmp_path / "store").release()  # which a server without tests has not taken
    with pytest.raises(NotFound):
        await third.tests.remove("chat")


@on_a_loop
async def test_a_store_without_tests_is_left_alone(tmp_path: Path) -> None:
    """Be it of an older version, or of this one and in use by another server."""
    folder = tmp_path / "store"
    folder.mkdir()
    for migrations in (MIGRATIONS[:2], MIGRATIONS):
        database = Database.open(folder, migrations=migrations)
        lock = FolderLock(folder)
        assert not Database.holds(folder, "ab_tests")
        server = Server(tmp_path)
        await server.tests.bring_up()
        assert list(server.tests) == [] and database.rows("PRAGMA user_version") == [(len(migrations),)]
        lock.release()
        database.close()
    (folder / "learning.db").write_bytes(b"no database" * 1000)
    server = Server(tmp_path)
    await server.tests.bring_up()  # serves without tests, and says why in the log
    assert list(server.tests) == []


@on_a_loop
async def test_a_learner_that_is_not_open_yet_says_so(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda: None)
    with pytest.raises(EngineUnavailable):
        await server.tests.put("chat", ARMS, TEST)
    assert "chat" not in server.models.aliases


@on_a_loop
async def test_an_alias_whose_name_is_taken_at_a_restart_does_not_come_back(tmp_path: Path) -> None:
    first = Server(tmp_path)
    await first.tests.put("chat", ARMS, TEST)
    await first.database.close()
    second = Server(tmp_path)
    second.load("chat")
    await second.tests.bring_up()
    assert "chat" not in second.models.aliases and second.tests.describe("chat") is None
    await second.database.close()


@on_a_loop
async def test_several_choices_count_as_one_answer(tmp_path: Path) -> None:
    server = Server(tmp_path)
    await server.tests.put("chat", ARMS, TEST)
    answer = server.answer("new")
    await server.tests.count(answer, [None, None])
    assert server.counted == 0
    await server.tests.count(answer, [1.0, None, 0.5])
    await server.tests.count(answer, [0.0])
    assert server.counted == 1 and server.test["arms"][1]["mean_score"] == 0.75
    await server.database.close()


@on_a_loop
async def test_scores_at_once_all_count(tmp_path: Path) -> None:
    server = Server(tmp_path)
    await server.tests.put("chat", ARMS, TEST)
    same = server.answer("old")
    answers = [same, same, *(server.answer("new") for _ in range(20))]
    await asyncio.gather(*(server.tests.count(answer, [0.5]) for answer in answers))
    assert server.counted == 21
    await server.database.close()

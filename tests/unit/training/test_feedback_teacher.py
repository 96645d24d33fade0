"""The teacher: feedback becomes guarded updates, each learned from as often as the settings say, after kills, too."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem.config import Config, FeedbackConfig
from mlx_tandem.training.feedback import teacher as module
from mlx_tandem.training.feedback.opinions import Feedback
from mlx_tandem.training.feedback.store import FeedbackStore
from mlx_tandem.training.feedback.teacher import Teacher
from mlx_tandem.training.store.on_use import DatabaseOnUse
from tests.unit.learning_fakes import Points, config, died, group
from tests.unit.online_side import Side, on_a_loop


def settings(folder: Path, *, feedback: dict[str, Any] | None = None, **training: Any) -> Config:
    """With the clock of `Side`, 5 s: what was said at 1 s waits for more, what was said at 0 s has waited for long."""
    own: dict[str, Any] = {"learn": "policy", "batch_size": 2, "wait_s": 5.0, "epochs": 2, "replay": 1.0}
    return structs.replace(config(folder, **training), feedback=FeedbackConfig(**own | (feedback or {})))


def thumb(number: int, *, at: float = 1.0, **changes: Any) -> Feedback:
    """Its answer ends with a token that no other has."""
    made = Feedback(f"c{number}", 0, "api", at, "", 0, (1, number), ((1000 + number,),), score=float(number % 2))
    return structs.replace(made, **changes)


class Taught:
    """A side with a store and a teacher."""

    def __init__(self, chosen: Config, points: Points | None = None):
        self.side = Side(chosen, points)
        watch = self.side.learner.folder
        self.store = FeedbackStore(chosen.feedback, DatabaseOnUse(Path("unused"), lambda: watch.database))
        self.teacher = Teacher(chosen, self.side.learner, self.store, lambda: 5.0)

    @property
    def updates(self) -> int:
        return self.side.learner.status().updates

    async def bring_up(self) -> None:
        await self.side.bring_up()
        await self.side.until(lambda: self.side.learner._learner.is_up)  # The state after it has been saved, too.
        self.side.learner.start()
        self.teacher.start()

    async def say(self, *feedback: Feedback) -> None:
        await self.store.add(feedback)
        self.teacher.wake()

    async def close(self) -> None:
        await self.teacher.close()
        await self.side.learner.close()


@contextlib.asynccontextmanager
async def teaching(chosen: Config) -> AsyncIterator[Taught]:
    taught = Taught(chosen)
    await taught.bring_up()
    try:
        yield taught
    finally:
        await taught.close()


@on_a_loop
async def test_each_feedback_is_learned_from_as_often_as_the_settings_say(tmp_path: Path) -> None:
    async with teaching(settings(tmp_path)) as taught:
        await taught.say(thumb(1))
        await taught.say(thumb(2), thumb(3, adapter="shout"), thumb(4, comment="", score=None))
        await taught.side.until(lambda: taught.updates >= 2)
        assert Counter(taught.side.trained) == {1001: 2, 1002: 2}, "not the other adapter's, and not a comment alone"
        report = taught.side.learner.history[-1]
        assert (report.outcome, report.feedback, report.replayed) == ("published", 2, 0)
        assert taught.side.version == 3
        await taught.say(thumb(5), thumb(7))
        await taught.side.until(lambda: taught.updates >= 4)
        assert Counter(taught.side.trained) == {1001: 4, 1002: 2, 1005: 2, 1007: 2}, (
            "the good one is repeated beside these"
        )
        assert taught.side.learner.history[-1].replayed == 1
        assert taught.teacher.describe()["state"] in ("learning", "waiting")
        rows = await taught.store.page(None, 10, newest_first=False)
        assert [(s.feedback.completion, s.learned) for s in rows if s.learned] == [
            (f"c{i}", 2) for i in (1, 2, 4, 5, 7)
        ]


@on_a_loop
async def test_less_than_a_batch_is_learned_from_when_it_has_waited(tmp_path: Path) -> None:
    async with teaching(settings(tmp_path, feedback={"epochs": 1})) as taught:
        await taught.say(thumb(1))
        await taught.side.learner.add(group(1), 2)
        await taught.side.learner.add(group(2), 2)
        await taught.side.until(lambda: taught.updates >= 1)
        assert 1001 not in taught.side.trained
        await taught.say(thumb(1, at=0.0, comment="still"))
        await taught.side.until(lambda: taught.updates >= 2)
        assert 1001 in taught.side.trained


@on_a_loop
async def test_long_answers_are_learned_from_in_smaller_updates(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_TOKENS", 9)
        async with teaching(settings(tmp_path, feedback={"epochs": 1, "wait_s": 0.0})) as taught:
            await taught.say(thumb(1), thumb(2))
            await taught.side.until(lambda: taught.updates >= 2)
            assert Counter(taught.side.trained) == {1001: 2, 1002: 1}, "the first is repeated beside the second"
            assert [report.feedback for report in taught.side.learner.history] == [1, 1]


@on_a_loop
async def test_nothing_is_learned_while_learning_is_stopped(tmp_path: Path) -> None:
    async with teaching(settings(tmp_path)) as taught:
        taught.side.learner.stop()
        await taught.say(thumb(1), thumb(2))
        await taught.side.until(lambda: taught.teacher.status.state == "stopped")
        assert not taught.updates
        taught.side.learner.start()
        taught.teacher.wake()
        await taught.side.until(lambda: taught.updates >= 2)


@on_a_loop
async def test_an_update_that_moves_the_policy_too_far_is_taken_back(tmp_path: Path) -> None:
    chosen = settings(tmp_path, guard_kl=1e-6, feedback={"epochs": 1, "learning_rate": 1.0})
    async with teaching(chosen) as taught:
        before = taught.side.version
        await taught.say(thumb(1), thumb(2))
        await taught.side.until(lambda: taught.updates >= 1)
        report = taught.side.learner.history[-1]
        assert report.outcome == "rolled_back" and "moved" in report.reason
        assert (taught.side.version, taught.side.trained) == (before, ())


@on_a_loop
async def test_an_adapter_that_began_as_another_does_not_learn_from_the_base(tmp_path: Path) -> None:
    side = Side(settings(tmp_path))
    chosen = settings(tmp_path, init_from="sql")
    store = FeedbackStore(chosen.feedback, DatabaseOnUse(tmp_path))
    assert Teacher(chosen, side.learner, store, lambda: 0.0).adapters == ("policy",)
    await side.learner.rewards.close()


def test_kills_at_any_point_neither_lose_nor_repeat_anything(tmp_path: Path) -> None:
    """The process is killed at the first point at which it can be, at the second, and so on; another one goes on."""
    at = 1
    while True:
        found: list[bool] = []

        @on_a_loop
        async def run(folder: Path, at: int = at, found: list[bool] = found) -> None:
            first = Taught(settings(folder), Points(at))
            with contextlib.suppress(BaseException):
                await first.bring_up()
                await first.say(thumb(1), thumb(2))
                await first.side.until(lambda: first.updates >= 2)
            found.append(first.side.points.broken)
            await first.teacher.close()
            await first.side.kill()
            second = Taught(settings(folder))
            await second.bring_up()
            if not await second.store.page(None, 10, newest_first=False):
                await second.say(thumb(1), thumb(2))
            await second.side.until(lambda: second.updates >= 2)
            assert Counter(second.side.trained) == {1001: 2, 1002: 2}
            await second.close()

        folder = tmp_path / str(at)
        folder.mkdir()
        run(folder)
        if not found[0]:
            break
        at += 1
    assert at > 10, "there were points to be killed at"


@pytest.mark.parametrize("at", [8, 12, 16, 20])
def test_an_update_goes_on_with_the_next_engine(tmp_path: Path, at: int) -> None:
    @on_a_loop
    async def run(folder: Path) -> None:
        taught = Taught(settings(folder))
        await taught.bring_up()
        taught.side.points.count, taught.side.points.at, taught.side.points.error = 0, at, died
        await taught.say(thumb(1), thumb(2))
        await taught.side.until(lambda: taught.updates >= 2)
        assert taught.side.points.broken, "there was such a point"
        taught.side.client.restart()
        await taught.side.bring_up()
        await taught.side.until(lambda: taught.updates >= 2)
        assert Counter(taught.side.trained) == {1001: 2, 1002: 2}
        await taught.close()

    run(tmp_path)

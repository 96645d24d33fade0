"""The guard of the online loop: what is worse is never served, and what is not to be trusted is not learned."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.types import SamplingParams
from tests.unit.learning_fakes import config, group
from tests.unit.online_side import TRAINER, Side, feed, on_a_loop, running, validated

pytestmark = pytest.mark.usefixtures("at_once")


@on_a_loop
async def test_a_sampler_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        await side.learner.add([t for n in (1, 2) for t in group(n, p=-2.0)], 2)
        await side.until(lambda: side.learner.status().updates == 1)
        report = side.learner.history[-1]
        assert (report.outcome, side.version) == ("refused", 1)
        assert not side.trained and not side.client.trainers[TRAINER].gradients
        await side.learner.add([t for n in (3, 4) for t in group(n, p=-1.1)], 2)
        await side.until(lambda: side.learner.status().updates == 2)
        assert side.learner.history[-1].verdict == "corrected"
        assert side.trained == (300, 301, 400, 401)
    async with running(config(tmp_path)) as side:
        assert side.trained == (300, 301, 400, 401), "what was refused is not learned at the next start either"


@on_a_loop
async def test_a_step_that_goes_too_far_is_taken_back_and_the_next_is_half_as_long(tmp_path: Path) -> None:
    async with running(config(tmp_path, learning_rate=80.0)) as side:
        await feed(side, [1, 2], 1)
        report = side.learner.history[-1]
        assert (report.outcome, side.version, side.trained) == ("rolled_back", 1, ())
        assert "moved" in report.reason and report.kl > 0.5
        assert report.step == 0, "the optimiser is where it was"
        await feed(side, [3, 4], 2)
        assert side.client.rates == [80.0, 40.0]
    async with running(config(tmp_path, learning_rate=80.0)) as side:
        assert side.learner.status().rollbacks == 2
        await feed(side, [5, 6], 3)
        assert side.learner.history[-1].outcome == "rolled_back"
        assert side.client.rates == [20.0], "restarts do not forget"
        await side.until(lambda: not side.learner.status().running)
        assert "3 updates in a row" in side.learner.status().reason
        await feed(side, [7, 8], 3)
        side.learner.start()
        await side.until(lambda: side.learner.status().updates == 4)
        assert side.learner.status().publishes == 1


@on_a_loop
async def test_gradients_that_are_not_finite(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        side.client.broken_gradients = True
        await feed(side, [1, 2], 1)
        report = side.learner.history[-1]
        assert (report.outcome, report.grad_norm, side.trained) == ("rolled_back", 0.0, ())


@on_a_loop
async def test_a_version_that_answers_worse_is_never_current(tmp_path: Path) -> None:
    served: list[int] = []

    def answer(shift: float) -> str:
        return "yes" if shift < 0.9 else "no"

    async with running(config(tmp_path / "c", validation_prompts=str(validated(tmp_path))), answer) as side:
        await feed(side, [1, 2], 1)
        assert (side.version, side.learner.history[-1].validation) == (2, 1.0)
        await feed(side, [3, 4], 2)
        report = side.learner.history[-1]
        assert (report.outcome, report.validation, side.version) == ("rolled_back", 0.0, 2)
        assert "validation" in report.reason
        await side.until(lambda: 3 in side.server.retired)
        await feed(side, [5, 6], 3)
        assert side.learner.history[-1].outcome == "published", "half as far"
        assert side.client.trainers[TRAINER].shift == 0.75
        served.append(side.version)
        assert await side.learner.checkpoint() == "checkpoint-2"
        assert Checkpoints(tmp_path / "c", 9).list()[0].reward == 1.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2"),
        ('{"prompt": "x", "scoring_function": "gsm8k"}', "metadata.answer"),
        ('{"prompt": "x", "scoring_function": "nothing"}', "nothing"),
        ('{"prompt": "", "scoring_function": "contains", "metadata": {"answer": "a"}}', "0 tokens"),
        ('{"prompt": "x", "scoring_function": "contains", "metadata": {"answer": "a"}, "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "x", "scoring_function": "length", "other": 0}', "other"),
        ('{"prompt": [{"role": "evil", "content": "x"}], "scoring_function": "length"}', "prompt[0].role"),
    ],
)
def test_wrong_validation_prompts_are_refused_at_the_start(tmp_path: Path, line: str, says: str) -> None:
    async def test() -> None:
        path = validated(tmp_path, 1)
        path.write_text(path.read_text() + "\n" + line)
        side = Side(config(tmp_path / "c", validation_prompts=str(path)))
        try:
            with pytest.raises(InvalidRequest, match="line 2") as e:
                await side.bring_up()
            assert says in str(e.value)
        finally:
            await side.learner.close()

    asyncio.run(test())


@on_a_loop
async def test_rewards_of_live_traffic_that_fall_bring_the_better_version_back(tmp_path: Path) -> None:
    async with running(config(tmp_path, guard_reward_drop=0.2)) as side:
        await side.learner.add([t for n in (1, 2) for t in group(n, rewards=(0.8, 1.0))], 2)
        await side.until(lambda: side.version == 2)
        bad = [t for n in range(3, 8) for t in group(n, version=2, p=-1.05, rewards=(0.0, 0.1))]
        side.learner.stop()
        await side.learner.add(bad, 2)
        side.learner.start()
        await side.until(lambda: side.learner.status().rollbacks == 1)
        await side.until(lambda: len(side.server.saves) == 1)
        assert side.version == 1 and side.trained == ()
        assert side.learner.status().learning_rate == 0.25
    async with running(config(tmp_path), start=False) as side:
        assert side.trained[:4] != (100, 101, 200, 201), "it is still rolled back after a restart"


@on_a_loop
async def test_rollback_and_switch(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        for i in range(3):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        assert await side.learner.checkpoint("mine") == "mine"
        await feed(side, [7, 8], 4)
        assert side.version == 5
        assert (await side.learner.switch("mine")).version == 4
        assert (side.version, len(side.trained)) == (4, 16), "the trainer goes on"
        assert (await side.learner.switch("policy@3")).version == 3
        ref = await side.learner.rollback("mine")
        assert (ref.version, side.version, len(side.trained)) == (4, 4, 12)
        assert side.client.followed[-1] == ref
        ref = await side.learner.rollback("3")
        assert (ref.version, len(side.trained)) == (3, 8)
        for wrong in ("99", "policy@98", "nothing"):
            with pytest.raises(NotFound):
                await side.learner.rollback(wrong)
        assert len(side.trained) == 8
        ids = side.learner._learner.ledger.buffer.seen
    async with running(config(tmp_path)) as side:
        assert (side.version, side.trained) == (3, (100, 101, 200, 201, 300, 301, 400, 401))
        await side.learner.add(group(7), 2)
        assert side.learner.status().dropped_duplicate == 2, "learned once, on a course that was left"
        assert set(side.learner._learner.ledger.buffer.seen) == set(ids)


@on_a_loop
async def test_recorded_prompts_are_sampled_again_when_there_is_too_little(tmp_path: Path) -> None:
    async with running(config(tmp_path, group_size=4), lambda shift: "yes", start=False) as side:
        scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
        side.learner.record_prompt((1, 2, 3), scoring, SamplingParams(8, temperature=0.0))
        side.learner.start()
        await side.until(lambda: side.learner.status().updates >= 3)
        report = side.learner.history[0]
        assert (report.trajectories, report.mean_reward, report.outcome) == (4, 0.5, "published")
        assert len(set(side.server.seeds)) == len(side.server.seeds), "never the same draw twice"

"""The guard of the online loop: what is worse is never served, and what is not to be trusted is not learned."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.training.online.arms import Pair
from mlx_tandem.training.online.guard import GIVE_UP, RECOVERY
from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.training.online.trial import CANDIDATE_UPDATES
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


@pytest.mark.promise("I7")
@on_a_loop
async def test_a_step_that_goes_too_far_is_taken_back_and_the_rate_falls_and_recovers(tmp_path: Path) -> None:
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
        assert side.client.rates == [20.0], "restarts do not forget"
        await feed(side, [7, 8], 4)
        await feed(side, [9, 10], 5)
        assert [r.outcome for r in side.learner.history] == [*["rolled_back"] * 3, "published", "published"]
        assert side.client.rates[1:] == [10.0, 10.0 * RECOVERY], "it recovers with what stands"
    async with running(config(tmp_path, learning_rate=8.0)) as side:
        assert side.learner.status().learning_rate == 8.0, "a rate that somebody sets begins as it is"


@pytest.mark.promise("I7")
@on_a_loop
async def test_it_pauses_when_nothing_helps(tmp_path: Path) -> None:
    async with running(config(tmp_path, learning_rate=80.0 * 2**GIVE_UP)) as side:
        for i in range(GIVE_UP):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        await side.until(lambda: not side.learner.status().running)
        assert f"{GIVE_UP} updates in a row" in side.learner.status().reason
        await feed(side, [97, 98], GIVE_UP)
        side.learner.start()
        await side.until(lambda: side.learner.status().updates == GIVE_UP + 1)
        assert side.client.rates[-1] == 80.0


@on_a_loop
async def test_gradients_that_are_not_finite(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        side.client.broken_gradients = True
        await feed(side, [1, 2], 1)
        report = side.learner.history[-1]
        assert (report.outcome, report.grad_norm, side.trained) == ("rolled_back", 0.0, ())


@on_a_loop
async def test_a_version_that_answers_much_worse_is_never_current(tmp_path: Path) -> None:
    def answer(shift: float) -> str:
        return "yes" if shift < 0.9 else "no"

    async with running(config(tmp_path / "c", validation_prompts=str(validated(tmp_path, 24))), answer) as side:
        await feed(side, [1, 2], 1)
        assert (side.version, side.learner.history[-1].validation) == (2, 0.5)
        assert len(set(side.server.seeds)) == 1, "both versions draw alike"
        await feed(side, [3, 4], 2)
        report = side.learner.history[-1]
        assert (report.outcome, report.validation) == ("rolled_back", 0.0)
        assert "worse than the accepted version by" in report.reason and "on 48 prompts" in report.reason
        await side.until(lambda: side.version == 1)
        assert 3 in side.server.retired, "nobody was ever answered by it"
        assert side.trained == (), "back at the accepted version, which is the first"
        await feed(side, [5, 6], 3)
        assert side.learner.history[-1].outcome == "published", "half as far"
        assert side.client.trainers[TRAINER].shift == 0.25


@on_a_loop
async def test_validation_prompts_are_answered_more_often_while_versions_look_worse(tmp_path: Path) -> None:
    asked: list[int] = []

    def answer(shift: float) -> str:
        return "yes" if shift < 0.9 else "no"

    settings = config(tmp_path / "c", validation_prompts=str(validated(tmp_path, 4)), validation_answers=2)
    async with running(settings, answer) as side:
        original = side.server.sample

        async def sample(prompts: Any, n: int, *rest: Any) -> Any:
            asked.append(n)
            return await original(prompts, n, *rest)

        side.server.sample = sample  # type: ignore[method-assign]
        for i in range(3):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
    assert asked[:4] == [2] * 4, "nothing has looked worse so far"
    assert 2 < asked[4] <= 8
    assert asked[4] == asked[5], "both versions alike"


@on_a_loop
async def test_the_control_arm_takes_back_what_is_worse_and_keeps_the_optimiser(tmp_path: Path) -> None:
    """The rewards of the client stay the same: only the comparison sees that the prompts became easier."""

    def answer(shift: float) -> str:
        return "yes" if shift < 0.9 else "no"

    made = config(tmp_path, guard_prompts=1000)
    async with running(made, answer) as side:
        await ask(side, 0)
        await feed(side, [1, 2], 1)
        await feed(side, [3, 4], 2)
        assert (side.version, side.learner.status().accepted) == (3, 1)
        for i in range(1, 60):
            if not side.learner.status().rollbacks:
                await ask(side, i)
        assert side.learner.status().rollbacks == 1
        await side.until(lambda: side.version == 1 and side.learner._learner.is_up)
        assert side.learner.status().compared == 0 and side.trained == ()
        assert side.learner.status().available_checkpoints[0].startswith(("guard", "best")), (
            "rollbacks use up no checkpoints"
        )
    async with running(made, answer, start=False) as side:
        assert (side.version, side.trained, side.learner.status().rollbacks) == (1, (), 1)


async def ask(side: Side, number: int) -> None:
    """A client's request, answered by whoever the control arm says, and scored as that version answers."""
    current = side.server.current()
    assert current is not None
    pair = side.learner.choose(current)
    scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
    prompt = Prompt((1, number), scoring, SamplingParams(8, seed=number))
    by = current if pair is None else pair.first
    shift = side.client.memory[by.digest][1]
    if pair is not None:
        side.learner.wait(prompt, [0.5, 0.5] if shift < 0.9 else [0.0, 0.0], 2, pair)
        count = side.learner.status().compared
        await side.until(lambda: side.learner.status().compared != count)


@on_a_loop
async def test_a_prompt_that_waits_for_a_version_that_has_gone_is_given_up_alone(tmp_path: Path) -> None:
    async with running(config(tmp_path, guard_prompts=1000), lambda _: "yes", start=False) as side:
        await side.learner.checkpoint()
        scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
        for number in range(1, 6):
            await side.learner.update(group(number, version=side.version))
            newest, accepted = side.server.current(), side.learner._learner.judging.accepted
            assert newest is not None and accepted is not None
            prompt = Prompt((1, number), scoring, SamplingParams(8, seed=number))
            side.learner.wait(prompt, [0.5, 0.5], 2, Pair(accepted, newest))
        assert 2 in side.server.retired
        side.client.memory = {
            d: w for d, w in side.client.memory.items() if d in side.learner._learner.versions.digests
        }
        side.learner.start()
        await side.until(lambda: not side.learner._learner.judging.arms.waiting)
        await side.until(lambda: side.learner.status().compared == 3)
        assert side.learner.status().running


@on_a_loop
async def test_comparisons_survive_the_end_of_the_process(tmp_path: Path) -> None:
    made = config(tmp_path, guard_prompts=1000)
    side = Side(made)
    await side.bring_up()
    side.learner.start()
    await feed(side, [1, 2], 1)
    for i in range(5):
        await ask(side, i)
    trial = side.learner._learner.ledger.counters.trial
    await side.learner._learner.ledger.flush()
    assert trial.comparison.count == 5
    before = msgspec.json.encode(trial)
    await side.kill()
    async with running(made, start=False) as side:
        assert msgspec.json.encode(side.learner._learner.ledger.counters.trial) == before
        assert side.learner.status().accepted == 1


@on_a_loop
async def test_a_version_that_answers_better_becomes_the_accepted_one(tmp_path: Path) -> None:
    def answer(shift: float) -> str:
        return "yes" if shift > 0.9 else "no"

    async with running(config(tmp_path, guard_prompts=1000), answer) as side:
        for i in range(CANDIDATE_UPDATES):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        await side.until(lambda: "guard-10" in side.learner.status().available_checkpoints)
        for i in range(60):
            current = side.server.current()
            assert current is not None
            pair = side.learner.choose(current)
            if pair is None:
                break
            good = side.client.memory[pair.first.digest][1] > 0.9
            prompt = Prompt(
                (1, i), side.learner.rewards.check("exact_match", {"answer": "yes"}), SamplingParams(8, seed=i)
            )
            side.learner.wait(prompt, [0.5] * 2 if good else [0.0] * 2, 2, pair)
            await side.until(lambda: not side.learner._learner.judging.arms.waiting)
        assert side.learner.status().accepted == 11
        await feed(side, [97, 98], 11)
        await side.until(lambda: "guard-0" not in side.learner.status().available_checkpoints or side.version == 12)


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
async def test_rewards_that_fall_raise_an_alarm_and_nothing_is_taken_back_for_them(tmp_path: Path) -> None:
    async with running(config(tmp_path), start=False) as side:
        for n in range(100):
            await side.learner.add(group(n, rewards=(0.6, 0.8)), 2)
        assert side.learner.status().alarm == ""
        for n in range(100, 160):
            await side.learner.add(group(n, rewards=(0.1, 0.3)), 2)
        assert "is 0." in side.learner.status().alarm and "that of the 64 before" in side.learner.status().alarm
        assert side.learner.status().rollbacks == 0


@on_a_loop
async def test_a_version_that_somebody_goes_back_to_is_not_compared_with_others(tmp_path: Path) -> None:
    """Otherwise rewards from before would undo what the operator has asked for."""
    async with running(config(tmp_path, guard_reward_drop=0.2)) as side:
        await side.learner.add([t for n in (1, 2) for t in group(n, rewards=(0.8, 1.0))], 2)
        await side.until(lambda: side.version == 2)
        side.learner.stop()
        bad = [t for n in range(3, 8) for t in group(n, version=2, p=-1.05, rewards=(0.0, 0.1))]
        await side.learner.add(bad, 2)
        assert (await side.learner.rollback("2")).version == 2
        side.learner.start()
        await side.until(lambda: side.learner.status().updates == 2)
        assert side.learner.status().rollbacks == 0


@on_a_loop
async def test_from_where_somebody_goes_back_to_everything_is_compared_afresh(tmp_path: Path) -> None:
    async with running(config(tmp_path, guard_prompts=4)) as side:
        for i in range(2):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        side.learner.stop()
        for _ in range(3):
            side.learner._learner.ledger.compared(-1.0, 0.0)
        assert (side.learner.status().compared, side.learner.status().accepted) == (3, 1)
        assert (await side.learner.rollback("2")).version == 2
        status = side.learner.status()
        assert (status.compared, status.difference, status.accepted) == (0, 0.0, 2)


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
        with pytest.raises(NotFound, match="the optimiser of version 3 is gone"):
            await side.learner.rollback("3")
        assert (side.version, len(side.trained)) == (4, 12), "where it was"
        for wrong in ("99", "policy@98", "nothing"):
            with pytest.raises(NotFound):
                await side.learner.rollback(wrong)
        assert len(side.trained) == 12
        ids = side.learner._learner.ledger.buffer.seen
    async with running(config(tmp_path)) as side:
        assert (side.version, len(side.trained)) == (4, 12)
        await side.learner.add(group(7), 2)
        assert side.learner.status().dropped_duplicate == 2, "learned once, on a course that was left"
        assert set(side.learner._learner.ledger.buffer.seen) == set(ids)


@on_a_loop
async def test_going_back_to_a_version_without_a_checkpoint_keeps_its_optimiser(tmp_path: Path) -> None:
    """It is one of the newest states, or the updates since the newest one before it lead there."""
    async with running(config(tmp_path, warmup_steps=4)) as side:
        for i in range(2):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        assert (await side.learner.rollback("2")).version == 2
        assert (side.learner.status().step, side.trained) == (1, (100, 101, 200, 201))
        assert side.learner.status().available_checkpoints == ("guard-1",), "it is durable"
        for i in range(2, 5):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        before = side.trained
        assert (await side.learner.rollback()).version == 5, "the one before"
        assert (side.learner.status().step, side.trained) == (3, before[:-4])
        await feed(side, [21, 22], 6)
        assert side.client.rates[-1] == 0.5, "warm-up does not begin again"
    async with running(config(tmp_path), start=False) as side:
        assert side.trained == (*before[:-4], 2100, 2101, 2200, 2201)


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


@on_a_loop
async def test_completions_of_a_recorded_prompt_are_learned_without_those_that_have_no_score(tmp_path: Path) -> None:
    async with running(config(tmp_path, group_size=4), lambda shift: "yes", start=False) as side:
        score = side.learner.rewards.score

        async def partly(*args: Any) -> list[float | None]:
            return [None if i % 4 == 3 else found for i, found in enumerate(await score(*args))]

        side.learner.rewards.score = partly  # type: ignore[method-assign]
        scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
        side.learner.record_prompt((1, 2, 3), scoring, SamplingParams(8, temperature=0.0))
        side.learner.start()
        await side.until(lambda: side.learner.status().updates >= 1)
        report = side.learner.history[0]
        assert (report.trajectories, report.groups, report.outcome) == (6, 2, "published")

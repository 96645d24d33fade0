"""What is counted for and against versions, to the last number: live rewards, comparisons, and what advice follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import Datum
from mlx_tandem.training.online import advantages
from mlx_tandem.training.online.arms import Arms, Pair, Waiting
from mlx_tandem.training.online.judging import TOLERATED, Judging
from mlx_tandem.training.online.live_rewards import LAG, MEMORY, LiveRewards, Mean
from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.training.online.saving import WORTH, Saver
from mlx_tandem.training.online.serving import Sampled
from mlx_tandem.training.online.trial import Reference, Trial
from mlx_tandem.training.rewards import Scoring
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterRef, SamplingParams

PARAMS, SCORING = SamplingParams(8), Scoring("f", ())
REFS = {n: AdapterRef("policy", n, str(n) * 64) for n in range(1, 6)}


class Side:
    """The judge with the accepted version 3, the newest version 5, and scores that a test sets."""

    def __init__(self, **settings: Any) -> None:
        self.compared: list[tuple[float, float]] = []
        self.scores: list[float | None] = []
        self.seeds: list[int | None] = []
        trial = Trial(accepted=Reference("c", 3, REFS[3].digest))
        ledger = SimpleNamespace(
            counters=SimpleNamespace(trial=trial), compared=lambda *seen: self.compared.append(seen), is_behind=False
        )
        self.known = {n: SimpleNamespace(ref=ref) for n, ref in REFS.items()}
        self.versions = SimpleNamespace(get=self.known.get, head=self.known[5], switched=False)
        made: list[Any] = [RLTrainingConfig(**settings), ledger, self.versions, self, self, lambda: 5.0]
        self.judging = Judging(*made)

    async def sample(self, tokens: Sequence[Any], n: int, params: SamplingParams, by: Any) -> list[list[Sampled]]:
        self.seeds.append(params.seed)
        return [[Sampled((1,), (-1.0,), (-1.0,), (by.version,), "x") for _ in range(n)] for _ in tokens]

    async def score(self, scoring: Sequence[Scoring], samples: Sequence[Any]) -> list[float | None]:
        await asyncio.sleep(0)
        found, self.scores = self.scores[: len(samples)], self.scores[len(samples) :]
        return found


def answer(prompt: int, versions: tuple[int, ...], reward: float) -> Trajectory:
    tokens = (5,) * len(versions)
    logprobs = (-1.0,) * len(versions)
    return Trajectory("t", "g", (1, prompt), tokens, logprobs, logprobs, versions, 1.0, reward)


def test_an_answer_counts_for_the_version_that_ended_it() -> None:
    judging = Side().judging
    judging.see([answer(1, (1, 1, 2), 0.5), answer(1, (2, 1), 1.0), answer(1, (2, 2), 0.0), answer(1, (), 9.0)])
    judging.see([answer(2, (0,), 7.0)])
    assert judging.live.means == {2: Mean(1, 0.25), 1: Mean(1, 1.0)}, "those of one prompt count once, the base never"


def test_what_a_client_sends_is_compared_prompt_by_prompt() -> None:
    """Answers of the accepted version alone, and those of later versions alone."""
    side = Side()
    side.judging.see_sent(
        [
            answer(1, (3,), 0.25), answer(1, (3, 3), 0.75), answer(1, (4,), 1.0), answer(1, (4, 5), 0.5),
            answer(1, (3, 4), 9.0), answer(1, (2,), 9.0), answer(1, (2, 5), 9.0), answer(1, (), 9.0),
            answer(2, (3,), 1.0), answer(3, (4,), 1.0),
        ]
    )  # fmt: skip
    assert side.compared == [(0.25, 0.0)]


@pytest.mark.parametrize(("scored", "n", "waits"), [(2, 4, True), (1, 4, False), (2, 5, False), (3, 5, True)])
def test_a_prompt_is_compared_where_half_of_its_answers_have_scores(scored: int, n: int, waits: bool) -> None:
    """The first answers, and the second ones."""
    side = Side()
    prompt = Prompt((1, 2), SCORING, PARAMS)
    side.judging.wait(prompt, [0.25, 0.75, 0.5][:scored], n, Pair(REFS[5], REFS[3]))
    assert len(side.judging.arms.waiting) == waits
    side.judging.arms.waiting.clear()
    side.judging.arms.waiting.append(Waiting(prompt, n, Pair(REFS[5], REFS[3]), 0.125))
    side.scores = [0.5] * scored + [None] * (n - scored)
    (group,) = asyncio.run(side.judging.draw())
    assert [t.reward for t in group] == [0.5] * scored
    assert side.compared == [(0.125 - 0.5, 0.0)] * waits


def test_the_difference_is_that_of_the_newest_version_whichever_of_both_was_second() -> None:
    side = Side()
    prompt = Prompt((1, 2), SCORING, PARAMS)
    for pair in (Pair(REFS[5], REFS[3]), Pair(REFS[3], REFS[5])):
        side.judging.wait(prompt, [1.0], 1, pair)
        side.scores = [0.25]
        asyncio.run(side.judging.draw())
    assert side.compared == [(0.75, 0.0), (-0.75, 0.0)]


def test_what_was_answered_while_another_version_was_accepted_is_not_compared() -> None:
    side = Side()
    side.judging.wait(Prompt((1, 2), SCORING, PARAMS), [1.0], 1, Pair(REFS[5], REFS[3]))
    side.scores = [0.25]

    async def test() -> list[list[Trajectory]]:
        drawing = asyncio.create_task(side.judging.draw())
        while side.scores:
            await asyncio.sleep(0)
            if side.seeds:
                side.judging.trial.accepted = Reference("d", 4, REFS[4].digest)
        return await drawing

    ((found,),) = asyncio.run(test())
    assert found.reward == 0.25, "it is learned from all the same"
    assert not side.compared


def test_while_somebody_has_switched_to_a_version_nothing_is_compared() -> None:
    side = Side(guard_prompts=1000)
    assert side.judging.choose(REFS[5]) is not None
    assert side.judging.choose(REFS[4]) is None, "only who asks for the newest one"
    side.versions.switched = True
    assert side.judging.choose(REFS[5]) is None


@pytest.mark.parametrize(("known", "reward"), [(2, 0.5), (1, None)])
def test_validation_needs_scores_of_half_of_the_prompts(known: int, reward: float | None) -> None:
    side = Side(guard_reward_drop=0.3, validation_answers=1)
    side.judging.validation.prompts = [Prompt((1, k), SCORING, PARAMS) for k in range(4)]
    side.scores = [0.5] * known + [None] * (4 - known) + [0.25, None, 0.25, 0.25]
    assert asyncio.run(side.judging.validate(REFS[5])) == reward
    assert side.compared == ([(0.25, 0.3 * TOLERATED)] if reward else [])
    if reward:
        side.scores = [0.5] * 4 + [0.5] * 4
        asyncio.run(side.judging.validate(REFS[5]))
        assert side.seeds[0] == side.seeds[1] != side.seeds[2] == side.seeds[3], "both alike, and others the next time"


def test_a_mean_forgets_what_is_older_than_its_memory() -> None:
    mean = Mean()
    for _ in range(MEMORY):
        mean.add(1.0)
    for count in range(1, 4):
        mean.add(0.0)
        assert mean.mean == pytest.approx((1 - 1 / MEMORY) ** count)


def test_an_alarm_is_raised_once_for_a_fall_of_more_than_the_bound() -> None:
    for drop, alarm in ((0.5, False), (0.4375, True)):
        live = LiveRewards(drop)
        for reward in [1.0] * LAG + [0.5] * LAG:
            live.add([reward], 1)
        assert (live.look(), bool(live.alarm)) == (alarm, alarm)
        assert not live.look(), "it has been said"


@pytest.mark.parametrize(("count", "worth"), [(1, None), (2, 0.5), (3, 0.5)])
def test_a_checkpoint_is_worth_something_from_enough_answers_on(count: int, worth: float | None) -> None:
    live = SimpleNamespace(means={7: Mean(count, 0.5)})
    config: Any = SimpleNamespace(rl_training=RLTrainingConfig(update_frequency=2 * WORTH))
    judging: Any = SimpleNamespace(live=live)
    states: Any = None
    rest: list[Any] = [None] * 5
    saver = Saver(config, *rest, judging, states)
    assert (saver._worth(7), saver._worth(8)) == (worth, None)


def test_the_pace_of_prompts_is_an_average_over_updates() -> None:
    arms = Arms(8)
    for _ in range(100):
        arms.choose(REFS[5], REFS[3], 1.0)
    arms.updated()
    assert arms._pace == pytest.approx(0.7 * 8 + 0.3 * 100)
    arms.updated()
    assert arms._pace == pytest.approx(0.7 * (0.7 * 8 + 0.3 * 100)), "there was none since then"


def test_data_is_cut_by_the_number_of_examples_and_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advantages, "PASS_TOKENS", 10)
    data = [Datum((1,) * length, 1, (1.0,) * (length - 1)) for length in (2, 2, 2, 2, 8, 2, 9, 2, 30, 3, 3, 4)]
    cuts = [[len(d.tokens) for d in cut] for cut in advantages._cut(data, 3)]
    assert cuts == [[2, 2, 2], [2, 8], [2], [9], [2], [30], [3, 3, 4]]

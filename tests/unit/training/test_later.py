"""Trajectories whose rewards come later: kept with their logprobs, continued, given credit by turn, and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import Truncation
from mlx_tandem.errors import Conflict, InvalidRequest, NotFound
from mlx_tandem.generation.answers import Answer
from mlx_tandem.generation.events import Finish
from mlx_tandem.training.live.learning import Learning
from mlx_tandem.training.live.recorder import Collect, Recorder
from mlx_tandem.training.online import guard
from mlx_tandem.training.online.advantages import batches
from mlx_tandem.training.open_trajectories import Beginning, Exchange, OpenTrajectories
from mlx_tandem.training.rewards import Scoring
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import SamplingParams, TokenLogprob
from tests.unit.learning_fakes import config
from tests.unit.online_side import Side, on_a_loop, running


def exchange(*given: int, said: Sequence[int] = (7, 8), version: int = 1) -> Exchange:
    n = len(said)
    return Exchange(given, tuple(said), (-0.5,) * n, (-0.7,) * n, (version,) * n)


def test_a_later_reward_changes_nothing_about_how_tokens_were_drawn() -> None:
    """Their truncation and the reason of the last end are learned from as with a reward that comes at once."""
    held = OpenTrajectories(10, 100.0)
    for begun, reason in ((Beginning("g", 0, 0.8, {"a": 1}, Truncation(0.9, 5, 0.1)), "stop"), (None, "length")):
        held.put("t", begun, structs.replace(exchange(1, 2), finish_reason=reason), 0.0)
        found = held.get("t")
        assert found is not None
        made = found.rewarded("t", 1.0, (), 5.0)
        assert (made.truncation, made.finish_reason, made.metadata) == (Truncation(0.9, 5, 0.1), reason, {"a": 1})
        (batch,) = batches([[made, turns("b", [0.0])]], RLTrainingConfig(update_frequency=9, mask_truncated=True))
        assert batch.data[0].truncation == Truncation(0.9, 5, 0.1)
        assert any(batch.data[0].mask or batch.data[0].weights) == (reason == "stop")


def two_turns(begun: Beginning = Beginning("g", 0, 0.8)) -> OpenTrajectories:  # noqa: B008
    held = OpenTrajectories(10, 100.0)
    held.put("t", begun, exchange(1, 2, 3), 0.0)
    held.put("t", None, exchange(4, 5, said=(9,), version=2), 1.0)
    return held


def test_a_trajectory_has_all_tokens_and_a_mask_of_its_own() -> None:
    found = two_turns().close("t")
    assert found is not None
    t = found.rewarded("t", 1.0, (), 5.0)
    assert (t.prompt, t.tokens, t.mask) == ((1, 2, 3), (7, 8, 4, 5, 9), (1, 1, 0, 0, 1))
    assert t.logprobs == (-0.5, -0.5, 0.0, 0.0, -0.5) and t.model_logprobs == (-0.7, -0.7, 0.0, 0.0, -0.7)
    assert t.versions == (1, 1, 2, 2, 2), "what was given has the version that it was given to"
    assert t.turns == [slice(0, 2), slice(4, 5)]
    assert (t.temperature, t.reward, t.group) == (0.8, 1.0, "g")


def test_what_tools_say_counts_nowhere() -> None:
    """Neither in the loss's means, nor in the comparison of sampler and trainer."""
    found = two_turns().close("t")
    assert found is not None
    t = found.rewarded("t", 1.0, (), 5.0)
    plain = RLTrainingConfig(algorithm="dapo", advantage_scale="none", update_frequency=1)
    other = Trajectory("u", "g", (1,), (3,), (-0.5,), (-0.7,), (1,), 0.8, 0.0)
    first, second = batches([[t, other]], plain)
    (datum,) = first.data
    assert datum.weights == (0.5, 0.5, 0.0, 0.0, 0.5) and datum.mask == t.mask
    assert [first.loss.scale, second.loss.scale] == pytest.approx([3 / 4, 1 / 4]), "by tokens that are trained"
    assert guard.mismatch([t], [(-0.7, -0.7, -9.0, -9.0, -0.7)], 1) == pytest.approx(0.0)
    assert guard.mismatch([t], [(-0.7, -0.7, -9.0, -9.0, -0.7)], 2) == pytest.approx(0.0)


def turns(name: str, rewards: Sequence[float], *, by_turn: bool = True) -> Trajectory:
    """One token for each turn, and one of a tool between two."""
    n = 2 * len(rewards) - 1
    mask = tuple(1 - i % 2 for i in range(n)) if n > 1 else ()
    each = tuple(rewards) if by_turn else ()
    whole = sum(rewards)
    return Trajectory(
        name, "g", (1,), (2,) * n, (-1.0,) * n, (-1.0,) * n, (1,) * n, 1.0, whole, mask=mask, turn_rewards=each
    )


def weights(*group: Trajectory, **settings: Any) -> list[tuple[float, ...]]:
    (batch,) = batches([group], RLTrainingConfig(algorithm="dr_grpo", update_frequency=99, **settings))
    return [d.weights for d in batch.data]


def test_each_turn_has_the_credit_for_what_comes_from_it_on() -> None:
    a, b = turns("a", [1.0, 0.0, 2.0]), turns("b", [0.0, 1.0])
    # Worth of a's turns: 3, 2, 2; of b's: 1, 1. The third turn of a has nothing to be compared with.
    assert weights(a, b) == [(1.0, 0.0, 0.5, 0.0, 0.0), (-1.0, 0.0, -0.5)]
    assert weights(a, b, leave_one_out=True) == [(2.0, 0.0, 1.0, 0.0, 0.0), (-2.0, 0.0, -1.0)]


def test_one_reward_is_for_all_turns() -> None:
    a, b = turns("a", [1.0, 0.0, 2.0], by_turn=False), turns("b", [0.0, 1.0], by_turn=False)
    assert weights(a, b) == [(1.0, 0.0, 1.0, 0.0, 1.0), (-1.0, 0.0, -1.0)]
    mixed = weights(turns("a", [0.0, 1.0]), turns("b", [0.0, 0.0], by_turn=False))
    assert mixed == [(0.5, 0.0, 0.5), (-0.5, 0.0, -0.5)], "a reward at the end alone comes to the same"


def test_the_oldest_go_for_lack_of_room_and_for_their_age() -> None:
    held = OpenTrajectories(3, 10.0, most_bytes=10_000)
    for i in range(5):
        held.put(f"t{i}", Beginning("g", 0, 1.0), exchange(1), float(i))
    assert held.superfluous(5.0) == ["t0", "t1"]
    held.put("t0", None, exchange(2), 5.0)
    assert held.superfluous(5.0) == ["t1", "t2"], "one that goes on is young again"
    assert held.superfluous(13.5) == ["t1", "t2", "t3"]
    small = OpenTrajectories(100, 1e9, most_bytes=held.bytes - 1)
    for i in range(5):
        small.put(f"t{i}", Beginning("g", 0, 1.0), exchange(1), 0.0)
    small.put("t0", None, exchange(2), 1.0)
    assert small.superfluous(1.0) == ["t1"]
    for id in list("t1 t2 t3 t4 t0".split()):
        small.close(id)
    assert small.bytes == 0 and len(small) == 0


def test_an_answer_makes_a_trajectory_young_again() -> None:
    held = OpenTrajectories(9, 10.0)
    held.put("t", Beginning("g", 0, 1.0), exchange(1), 0.0)
    held.put("t", None, exchange(2), 8.0)
    assert held.superfluous(18.0) == [] and held.superfluous(18.1) == ["t"]


def test_an_answer_to_what_is_no_longer_there_is_not_kept() -> None:
    held = OpenTrajectories(9, 10.0)
    assert not held.put("t", None, exchange(1), 0.0)
    assert (len(held), held.bytes) == (0, 0)


@pytest.mark.parametrize(("size", "told", "left"), [(3, "g", 2), (0, None, 0)])
def test_only_groups_of_known_size_are_told_that_one_will_never_come(size: int, told: str | None, left: int) -> None:
    held = OpenTrajectories(9, 10.0)
    for id, group in (("a", "g"), ("b", "g"), ("c", "other")):
        held.put(id, Beginning(group, size, 1.0), exchange(1), 0.0)
    assert held.forget("a") == told and held.forget("a") is None
    assert {id: begun.size for id, _, begun, _ in held.held} == {"b": left, "c": size}


async def begin(side: Side, count: int = 4, group: str = "g", size: int = 0) -> None:
    """Trajectories of one answer each, whose tokens no other has."""
    await side.learner.later.keep(
        [(f"{group}{i}", Beginning(group, size, 1.0), exchange(1, said=(100 + i,))) for i in range(count)]
    )


@on_a_loop
async def test_a_reward_that_comes_later_is_learned_from_once(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        await begin(side, size=4)
        later = side.learner.later
        assert side.learner.status().open_trajectories == 4
        for i in range(4):
            assert await later.reward(f"g{i}", float(i % 2))
        await side.until(lambda: side.learner.status().updates == 1)
        assert side.trained == (100, 101, 102, 103)
        assert side.learner.status().open_trajectories == 0
        with pytest.raises(Conflict, match="has its reward already") as closed:
            await later.reward("g0", 1.0)
        assert closed.value.code == "trajectory_closed"
        with pytest.raises(NotFound) as unknown:
            await later.reward("traj-nobody", 1.0)
        assert unknown.value.code == "trajectory_not_found"


@on_a_loop
async def test_a_group_does_not_wait_for_a_choice_that_was_not_kept(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        collect = Collect(
            adapter="policy",
            keep=True,
            shown=False,
            scoring=Scoring("later", ()),
            metadata={},
            groups=("g",),
            shared=False,
            prompts=("",),
            params=SamplingParams(2, temperature=1.0),
            later=True,
        )
        end = Finish(0, "stop")
        said = [Answer(tokens=[7], logprobs=[TokenLogprob(-0.7, -0.5)], versions=[0], finish=end) for _ in range(2)]
        recorder = Recorder(cast(Learning, SimpleNamespace(learner=side.learner)), collect, [(1, 2)], 3)
        *kept, empty = await recorder.record([*said, Answer(finish=end)])
        assert empty == {"trajectory_id": None, "dropped": "empty"}
        for reward, outcome in enumerate(kept):
            await side.learner.later.reward(outcome["trajectory_id"], float(reward))
        assert side.learner._learner.ledger.buffer.usable == 2, "the two are compared with each other"


@on_a_loop
async def test_wrong_rewards_change_nothing(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        await begin(side, 1)
        later = side.learner.later
        for reward, each, field in (
            (None, [], "reward"),
            (float("nan"), [], "reward"),
            (1e7, [], "reward"),
            (None, [1.0, 2.0], "turn_rewards"),
            (None, [float("inf")], "turn_rewards[0]"),
        ):
            with pytest.raises(InvalidRequest) as wrong:
                await later.reward("g0", reward, each)
            assert wrong.value.param == field
        assert await later.reward("g0", 0.5, [0.25])
        (held,) = side.learner._learner.ledger.buffer.held
        assert (held[0].reward, held[0].turn_rewards) == (0.75, (0.75,)), "the whole's counts for the last turn"


@on_a_loop
async def test_siblings_do_not_wait_for_what_will_have_no_reward(tmp_path: Path) -> None:
    """Before they have theirs, and after it; given up by somebody, or for its age."""
    async with running(config(tmp_path, open_trajectories=6)) as side:
        later = side.learner.later
        await begin(side, 3, "a", 3)
        await later.reward("a0", 0.0)
        await later.forget("a2")
        await begin(side, 3, "b", 3)
        await later.forget("b2")
        for id, reward in (("a1", 1.0), ("b0", 0.0), ("b1", 1.0)):
            await later.reward(id, reward)
        await side.until(lambda: side.learner.status().updates == 1)
        assert side.learner.history[-1].groups == 2 and side.learner.history[-1].trajectories == 4
        await begin(side, 3, "c", 3)
        await later.reward("c1", 1.0)
        await later.reward("c2", 0.0)
        assert side.learner.status().buffered == 2
        await begin(side, 6, "d")
        assert side.learner.status().dropped_no_reward == 3, "c0 was the oldest of too many"
        assert side.learner._learner.ledger.buffer.usable == 2
        assert "no reward came" in side.learner.status().advice
        with pytest.raises(NotFound):
            later.get("c0")


@on_a_loop
async def test_the_next_process_goes_on_with_what_was_kept(tmp_path: Path) -> None:
    """After a kill, and after a checkpoint has begun a new journal."""
    side = Side(config(tmp_path))
    await side.bring_up()
    await begin(side, 4, "g", 4)
    await side.learner.later.reward("g0", 0.0)
    await side.learner.later.forget("g1")
    await side.learner.later.keep([("g2", None, exchange(4, said=(9,)))])
    await side.kill()
    for _ in range(2):
        side = Side(config(tmp_path))
        await side.bring_up()
        assert side.learner.status().open_trajectories == 2
        assert side.learner.status().dropped_no_reward == 1
        found = side.learner.later.get("g2")
        assert [e.tokens for e in found.exchanges] == [(102,), (9,)]
        await side.learner.checkpoint()
        await side.kill()
    async with running(config(tmp_path, update_frequency=3)) as side:
        await side.learner.later.reward("g2", None, [0.0, 1.0])
        await side.learner.later.reward("g3", 0.0)
        await side.until(lambda: side.learner.status().updates == 1)
        assert side.trained == (100, 9, 103)


@on_a_loop
async def test_a_reward_that_comes_too_late_is_dropped_and_counted(tmp_path: Path) -> None:
    async with running(config(tmp_path, max_staleness=0)) as side:
        await begin(side, 4, "old", 4)
        await begin(side, 4, "g", 4)
        for i in range(4):
            await side.learner.later.reward(f"g{i}", float(i % 2))
        await side.until(lambda: side.learner.status().updates == 1)
        assert not await side.learner.later.reward("old0", 1.0)
        assert side.learner.status().dropped_stale == 1
        with pytest.raises(Conflict):
            await side.learner.later.reward("old0", 1.0)


@on_a_loop
async def test_a_new_engine_changes_nothing_for_what_waits(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        await begin(side, 4, "g", 4)
        await side.learner.later.reward("g0", 0.0)
        await side.learner.later.forget("g1")
        side.client.restart()
        await side.bring_up()
        assert side.learner.status().open_trajectories == 2
        for id, reward in (("g2", 1.0), ("g3", 1.0)):
            await side.learner.later.reward(id, reward)
        assert side.learner._learner.ledger.buffer.usable == 3

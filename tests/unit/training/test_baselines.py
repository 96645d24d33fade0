"""Answers without siblings: compared with answers to other prompts, and with what earlier ones were worth."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.training.online.advantages import batches
from mlx_tandem.training.online.baselines import MEMORY, MOST, Baseline, note
from mlx_tandem.training.trajectories import ACROSS, Buffer, Trajectory
from tests.unit.learning_fakes import config
from tests.unit.online_side import Side, on_a_loop, running

NAME = f"{ACROSS}exact_match:1"
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=12)


def single(number: int, reward: float, version: int = 1, group: str = NAME) -> Trajectory:
    """The only answer to a prompt of its own."""
    return Trajectory(f"t{number}", group, (number, 2), (number,), (-1.0,), (-1.0,), (version,), 1.0, reward)


@given(REWARDS, REWARDS)
def test_a_baseline_is_the_mean_of_everything_else(earlier: list[float], now: list[float]) -> None:
    baseline = Baseline()
    baseline.add(earlier)
    for i, advantage in enumerate(baseline.against(now)):
        others = earlier + now[:i] + now[i + 1 :]
        assert advantage == pytest.approx(now[i] - math.fsum(others) / len(others))


def test_an_answer_s_own_reward_does_not_move_its_baseline() -> None:
    """Which would bend the gradient."""
    baseline = Baseline(10, 0.4)
    low, high = baseline.against([0.0, 1.0, 1.0]), baseline.against([5.0, 1.0, 1.0])
    assert high[0] - low[0] == pytest.approx(5.0)
    assert low[0] != high[1]


@pytest.mark.parametrize("count", [1, MEMORY - 1, MEMORY, MEMORY + 1, 1000])
def test_earlier_answers_count_as_so_many_at_most(count: int) -> None:
    """They are of earlier versions, and the answers to compare with are those of now."""
    weight = min(count, MEMORY)
    assert Baseline(count, 0.5).against([1.0, 0.0]) == pytest.approx(
        [1.0 - (0.5 * weight + 0.0) / (weight + 1), 0.0 - (0.5 * weight + 1.0) / (weight + 1)]
    )


def test_old_rewards_are_forgotten_and_the_number_of_baselines_is_bounded() -> None:
    baseline = Baseline()
    baseline.add([0.0] * 1000 + [1.0] * 20 * MEMORY)
    assert baseline.mean == pytest.approx(1.0, abs=1e-3)
    assert baseline.against([1.0, 1.0])[0] == pytest.approx(0.0, abs=1e-3)
    kept: dict[str, Baseline] = {}
    for i in range(MOST + 3):
        note(kept, {"first": (1.0,), f"other {i}": (0.0,)})
    assert len(kept) == MOST and kept["first"].count == MOST + 3


def test_advantages_are_those_against_the_baseline() -> None:
    group = [single(i, r) for i, r in enumerate([1.0, 0.0, 1.0])]
    plain = RLTrainingConfig(algorithm="dr_grpo", update_frequency=8)
    (batch,) = batches([group], plain, {NAME: Baseline(2, 0.25)})
    assert [d.weights[0] for d in batch.data] == pytest.approx([1 - 1.5 / 4, -2.5 / 4, 1 - 1.5 / 4])
    (batch,) = batches([group], plain)
    assert [d.weights[0] for d in batch.data] == pytest.approx([0.5, -1.0, 0.5]), "the others alone"


def test_turns_of_answers_to_different_prompts_are_compared_with_those_of_the_others_alone() -> None:
    """An answer's own reward is no part of its baseline here either."""
    group = [replace(single(i, r), turn_rewards=(r,)) for i, r in enumerate([1.0, 0.0, 1.0])]
    (batch,) = batches([group], RLTrainingConfig(algorithm="dr_grpo", update_frequency=8))
    assert [d.weights[0] for d in batch.data] == pytest.approx([0.5, -1.0, 0.5])


def test_a_group_across_prompts_is_handed_out_in_pieces_that_vary() -> None:
    buffer = Buffer(100)
    for i in range(6):
        buffer.add(single(i, 1.0))
    assert buffer.usable == 0 and buffer.alike == 6
    buffer.add(single(6, 0.0))
    for i in range(7, 10):
        buffer.add(single(i, 1.0))
    assert buffer.usable == 10 and buffer.alike == 0
    (group,) = buffer.take(3, 1, 4).groups
    assert [t.id for t in group] == [f"t{i}" for i in range(7)], "up to the first that differs"
    assert buffer.usable == 0 and buffer.alike == 3
    buffer.add(single(10, 0.0))
    (group,) = buffer.take(2, 1, 4).groups
    assert [t.id for t in group] == ["t7", "t8", "t9", "t10"]
    assert not buffer.held


def test_others_have_their_turn_beside_a_group_that_never_ends() -> None:
    buffer = Buffer(100)
    for i in range(20):
        buffer.add(single(i, float(i % 2)))
    for i, reward in enumerate([0.0, 1.0]):
        buffer.add(replace(single(100 + i, reward), group="siblings"), 2)
    assert [g[0].group for g in buffer.take(4, 1, 4).groups] == [NAME]
    assert buffer.take(4, 1, 4).groups[0][0].group == "siblings"


def test_for_lack_of_room_the_oldest_go_one_by_one() -> None:
    buffer = Buffer(4)
    for i in range(6):
        buffer.add(single(i, 1.0))
    assert [t.id for t, _ in buffer.held] == ["t2", "t3", "t4", "t5"]
    assert buffer.counts.dropped_overflow == 2


@on_a_loop
async def test_single_answers_are_learned_from_and_the_baseline_survives(tmp_path: Path) -> None:
    """A restart, from the journal alone and from a checkpoint."""
    side = Side(config(tmp_path, siblings=0, algorithm="dr_grpo"))
    await side.bring_up()
    side.learner.start()
    for i, reward in enumerate([1.0, 0.0, 1.0, 1.0]):
        await side.learner.add([single(i, reward)])
    await side.until(lambda: side.learner.status().updates == 1)
    assert side.trained == (0, 1, 2, 3)
    baseline = side.learner._learner.ledger.counters.baselines[NAME]
    assert (baseline.count, baseline.mean) == (4, 0.75)
    await side.kill()
    async with running(config(tmp_path, siblings=0, algorithm="dr_grpo")) as side:
        assert side.learner._learner.ledger.counters.baselines == {NAME: Baseline(4, 0.75)}
        await side.learner.checkpoint("c")
    async with running(config(tmp_path, siblings=0, algorithm="dr_grpo")) as side:
        assert side.learner._learner.ledger.counters.baselines == {NAME: Baseline(4, 0.75)}
        for i, reward in enumerate([1.0, 0.0, 1.0, 1.0]):
            await side.learner.add([single(10 + i, reward)])
        await side.until(lambda: side.learner.status().updates == 2)
        weights = [d.weights[0] for d in side.client.passes[-1].data]
        assert weights == pytest.approx([1 - 5 / 7, -6 / 7, 1 - 5 / 7, 1 - 5 / 7])


@on_a_loop
async def test_the_status_says_that_equal_rewards_teach_nothing(tmp_path: Path) -> None:
    async with running(config(tmp_path, siblings=0)) as side:
        for i in range(6):
            await side.learner.add([single(i, 1.0)])
        await asyncio.sleep(0.01)
        assert side.learner.status().updates == 0
        assert "6 answers to different prompts wait" in side.learner.status().advice

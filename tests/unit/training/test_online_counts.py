"""What the online loop counts, keeps and forgets: over updates, checkpoints and restarts of engine and process."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_tandem.errors import EngineUnavailable, NotFound
from mlx_tandem.training.online import learner as learner_module
from mlx_tandem.training.online.guard import GIVE_UP
from mlx_tandem.training.open_trajectories import Beginning, Exchange
from mlx_tandem.types import SamplingParams
from tests.unit.learning_fakes import config, group
from tests.unit.online_side import TRAINER, Side, feed, on_a_loop, running, validated

pytestmark = pytest.mark.usefixtures("at_once")


@on_a_loop
async def test_a_report_counts_all_batches_and_what_is_trained_on(tmp_path: Path) -> None:
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), monotonic=time.monotonic)
        patch.setattr(learner_module, "time", clock)
        async with running(config(tmp_path, gradient_accumulation_steps=2)) as side:
            await feed(side, [1, 2, 3, 4], 1)
    (report,) = side.learner.history
    assert len(side.client.passes) == 2
    assert (report.loss, report.tokens, report.trajectories, report.groups) == (1.0, 8, 8, 4), "a half of each batch"
    assert (report.ready_ms, report.swap_ms) == (1000.0, 1000.0)


@on_a_loop
async def test_the_status_is_that_of_the_guard_and_of_the_loop(tmp_path: Path) -> None:
    async with running(config(tmp_path, learning_rate=80.0), start=False) as side:
        for number in (1, 2):
            await side.learner.add(group(number), 2)
        assert not side.learner.status().busy, "it has enough, and does not run"
        side.learner.start()
        await side.until(lambda: side.learner.status().updates == 1)
        assert side.learner.status().learning_rate == 40.0


@on_a_loop
async def test_means_of_live_rewards_survive_a_restart_and_go_with_their_versions(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        for n in range(14):
            await side.learner.add(group(n, version=side.version), 2)
            await side.learner.add(group(100 + n, version=side.version), 2)
            await side.until(lambda n=n: side.learner.status().updates > n)  # type: ignore[misc]
        judging, versions = side.learner._learner.judging, side.learner._learner.versions
        means = judging.live.means
        assert len(means) > 1 and set(means) <= {v.ref.version for v in versions}
    async with running(config(tmp_path), start=False) as side:
        found = side.learner._learner.judging.live.means
        assert found == means and found is not means


@on_a_loop
async def test_the_control_arm_learns_its_pace_from_updates_and_rests_with_the_loop(tmp_path: Path) -> None:
    async with running(config(tmp_path, guard_prompts=1000)) as side:
        await feed(side, [1, 2], 1)
        arms, current = side.learner._learner.judging.arms, side.server.current()
        assert current is not None
        for _ in range(5):
            assert side.learner.choose(current) is not None
        assert arms._seen == 5
        await feed(side, [3, 4], 2)
        current = side.server.current()
        assert current is not None and arms._seen == 0
        side.learner.stop()
        assert side.learner.choose(current) is None


@on_a_loop
async def test_a_checkpoint_is_worth_what_its_version_got_on_the_validation_prompts(tmp_path: Path) -> None:
    settings = config(tmp_path / "c", validation_prompts=str(validated(tmp_path)))
    async with running(settings, lambda _: "yes", start=False) as side:
        await side.learner.checkpoint("first")
        assert (await side.learner.update(group(1))).validation == 0.5
        await side.learner.checkpoint("good")
        assert (await side.learner.update(group(2, version=side.version), publish=False)).outcome == "kept"
        await side.learner.checkpoint("unknown")
        worth = {info.name: info.reward for info in side.learner._learner.ledger.listed}
        assert (worth["good"], worth["unknown"]) == (0.5, None)
        assert (await side.learner.update(group(3, version=side.version))).validation == 0.5
        await side.learner.rollback("first")
        worth = {info.name: info.reward for info in side.learner._learner.ledger.listed}
        assert worth["first"] is None, "it was never asked them"


@on_a_loop
async def test_an_update_by_hand_does_what_the_loop_would_do_behind_it(tmp_path: Path) -> None:
    async with running(config(tmp_path, interval=1, guard_prompts=1000), start=False) as side:
        await side.learner.checkpoint()  # of version 1, which is the accepted one
        await side.learner.update(group(1))
        await side.learner.add(group(2, version=2), 0)
        await side.learner.update(group(3, version=2))
        worth = {i.version: i.reward for i in side.learner._learner.ledger.listed if i.name != "best"}
        assert worth[2] == 0.5, "it has answers now"
        again = await side.learner.update([*group(3), *group(4, version=3)])
        assert again.dropped_at == {"duplicate": (0, 1)}
        trial = side.learner._learner.ledger.counters.trial
        accepted = trial.accepted
        assert accepted is not None and accepted.version != side.version
        trial.comparison.harm.stakes = [1e9] * 3
        await side.learner.update(group(5, version=side.version))
        assert (side.version, side.learner.status().rollbacks) == (accepted.version, 1)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await side.learner.update(group(6))


@on_a_loop
async def test_only_who_has_given_up_begins_to_count_again(tmp_path: Path) -> None:
    async with running(config(tmp_path), start=False) as side:
        course = side.learner._learner.ledger.counters.course
        for before, after in ((GIVE_UP - 1, GIVE_UP - 1), (GIVE_UP, 0)):
            course.in_a_row = before
            side.learner.start()
            assert course.in_a_row == after
            side.learner.stop()


@on_a_loop
async def test_versions_outlive_the_folders_of_their_checkpoints(tmp_path: Path) -> None:
    async with running(config(tmp_path, interval=1, keep=1)) as side:
        for n in range(4):
            await feed(side, [2 * n, 2 * n + 1], n + 1)
        await side.until(lambda: side.learner.status().checkpoint_saves >= 4)
        await side.learner.checkpoint()
        versions = list(side.learner._learner.versions)
        assert all(not v.folder or Path(v.folder).is_dir() for v in versions)
        bare = {v.ref.digest for v in versions if not v.folder}
        there = {v.ref.digest for v in versions if v.folder}
        assert bare and bare - there <= side.client.pinned | {versions[0].ref.digest}
        assert side.client.pinned


@on_a_loop
async def test_what_was_switched_to_once_is_not_served_again_after_a_later_version(tmp_path: Path) -> None:
    async with running(config(tmp_path), start=False) as side:
        await side.learner.update(group(1))
        await side.learner.checkpoint("old")
        await side.learner.update(group(2, version=2))
        await side.learner.switch("old")
        side.client.restart()
        await side.bring_up()
        assert side.version == 2
        await side.learner.update(group(3, version=3))
        await side.learner.checkpoint("new")
        newest = side.version
        side.client.restart()
        await side.bring_up()
        assert side.version == newest > 3


@on_a_loop
async def test_a_new_engine_gets_the_reference_again(tmp_path: Path) -> None:
    made = config(tmp_path, kl_coef=0.1, kl_reference="accepted", guard_prompts=1000)
    async with running(made, start=False) as side:
        await side.learner.checkpoint()
        assert (await side.learner.update(group(1))).outcome == "published"
        assert f"{TRAINER}-reference" in side.client.trainers
        side.client.restart()
        await side.bring_up()
        assert (await side.learner.update(group(2, version=2))).outcome == "published"
        assert f"{TRAINER}-reference" in side.client.trainers


@on_a_loop
async def test_as_many_prompts_are_sampled_as_an_update_needs(tmp_path: Path) -> None:
    """Four completions in groups of three take two prompts."""
    async with running(config(tmp_path, group_size=3), lambda _: "yes", start=False) as side:
        scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
        for number in range(3):
            side.learner.record_prompt((1, number), scoring, SamplingParams(8))
        assert await side.learner._sample()
        assert len(side.server.seeds) == 2 and side.learner.status().buffered == 6


def exchange(token: int) -> Exchange:
    return Exchange((1, 2), (token,), (-1.0,), (-1.0,), (1,), 0, b"")


@on_a_loop
async def test_what_waits_for_its_reward_goes_with_its_time_and_for_good(tmp_path: Path) -> None:
    settings = config(tmp_path, open_trajectory_s=60.0)
    side = Side(settings)
    await side.bring_up()
    await side.learner.later.keep([(name, Beginning("g", 3, 1.0), exchange(n)) for n, name in enumerate("abc")])
    await side.learner.later.forget("a")
    await side.kill()
    async with running(settings, start=False) as side:
        with pytest.raises(NotFound):
            side.learner.later.get("a")
        assert side.learner.later.get("b").begun.size == 2, "it does not wait for a"
        side.learner.later._clock = lambda: 5.0 + 59.0
        side.learner.later.get("b")
        side.learner.later._clock = lambda: 5.0 + 61.0
        with pytest.raises(NotFound):
            side.learner.later.get("b")
        assert side.learner.status().open_trajectories == 0

"""The online loop: it learns from each completion once and publishes what it has learned."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from mlx_tandem.errors import Conflict
from mlx_tandem.files import StorageError
from mlx_tandem.training import trajectories
from mlx_tandem.training.store import database
from mlx_tandem.training.store import rows as rows_module
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import SamplingParams
from tests.unit.learning_fakes import config, group
from tests.unit.online_side import TRAINER, feed, full_drive, on_a_loop, running

pytestmark = pytest.mark.usefixtures("at_once")


@on_a_loop
async def test_what_is_collected_is_learned_and_published(tmp_path: Path) -> None:
    async with running(config(tmp_path, warmup_steps=2)) as side:
        assert side.version == 1, "the fresh adapter is served before anything is learned"
        await side.learner.add(group(1), 2)
        await side.learner.add(group(1), 2)
        await side.learner.add(group(2, rewards=(1.0, 1.0)), 2)
        await asyncio.sleep(0.01)
        assert side.learner.status().updates == 0, "two completions are not four"
        await feed(side, [3], 1)
        status, report = side.learner.status(), side.learner.history[-1]
        assert side.trained == (100, 101, 300, 301)
        assert [w for d in side.client.passes[0].data for w in d.weights] == pytest.approx([-1, 1, -1, 1], abs=1e-3)
        assert (side.version, side.client.followed[-1].version) == (2, 2)
        assert (report.outcome, report.step, report.version, report.groups) == ("published", 1, 2, 2)
        assert (report.trajectories, report.mean_reward, report.verdict) == (4, 0.5, "ok")
        assert (status.dropped_duplicate, status.skipped_groups, status.trajectories_collected) == (2, 1, 6)
        assert (status.current_lora, status.step, status.publishes, status.buffered) == ("policy@2", 1, 1, 0)
        assert status.last_update == "1970-01-01T00:00:05Z"
        assert report.ready_ms > 0 and report.swap_ms > 0
        assert side.client.rates == [0.25], "half of the warm-up"
        assert msgspec.json.decode(msgspec.json.encode([status, report]))


@on_a_loop
async def test_batches_add_up_to_one_step(tmp_path: Path) -> None:
    async with running(config(tmp_path, gradient_accumulation_steps=2)) as side:
        await feed(side, [1, 2, 3], 0)
        await asyncio.sleep(0.01)
        assert not side.client.passes
        await feed(side, [4], 1)
        assert [len(b.data) for b in side.client.passes] == [4, 4]
        assert side.client.trainers[TRAINER].step == 1
        assert sum(b.loss.scale for b in side.client.passes) == pytest.approx(1.0)


@on_a_loop
async def test_too_old_completions_are_dropped(tmp_path: Path) -> None:
    async with running(config(tmp_path, max_staleness=1)) as side:
        await feed(side, [1, 2], 1)
        await feed(side, [3, 4], 2)
        assert side.version == 3
        await feed(side, [5, 6], 2)
        await side.until(lambda: side.learner.status().dropped_stale == 4)
        await side.learner.add([*group(9), *group(7, version=2)], 2)
        await side.until(lambda: side.learner.status().dropped_stale == 6)
        await asyncio.sleep(0.01)
        assert side.learner.status().updates == 2, "what is left is too little"
        late = group(8, version=1, rewards=(0.0, 1.0, 1.0))[-1]
        assert await side.learner.add([*group(8, version=2), late], 3) == {late.id}, (
            "its siblings wait no longer for it"
        )
        await side.until(lambda: side.learner.status().updates == 3)
        assert side.trained[-4:] == (700, 701, 800, 801)
    async with running(config(tmp_path)) as side:
        assert side.learner.status().buffered == 0, "the next start knows that they were dropped"


@on_a_loop
async def test_old_versions_go_and_those_with_a_checkpoint_stay(tmp_path: Path) -> None:
    async with running(config(tmp_path, interval=4)) as side:
        for i in range(8):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        await side.until(lambda: side.version == 9 and len(side.server.saves) == 2 and 6 in side.server.retired)
        # 5 and 9 have checkpoints.
        assert [e.ref.version for e in side.server.registry.versions(TRAINER)] == [5, 7, 8, 9]
        assert side.learner.status().available_checkpoints[:2] == ("checkpoint-8", "checkpoint-4")


@on_a_loop
async def test_manual_updates(tmp_path: Path) -> None:
    async with running(config(tmp_path), start=False) as side:
        external = [
            Trajectory(f"x{i}", "gx", (1,), (7 + i,), (), (), (), 0.7, float(i), external=True) for i in range(2)
        ]
        report = await side.learner.update(external, publish=False, checkpoint_name="mine")
        assert (report.outcome, report.version, side.version) == ("kept", 0, 1)
        assert (report.ready_ms, report.swap_ms) == (0, 0), "nothing was published"
        assert [d.logprobs for d in side.client.passes[0].data] == [None, None], "the trainer's own"
        assert side.learner.status().available_checkpoints == ("mine",)
        report = await side.learner.update(external)
        assert report.outcome == "skipped", "the same ids again"
        assert side.learner.status().dropped_duplicate == 2
        with pytest.raises(Conflict):
            await side.learner.update(external, checkpoint_name="mine")
        await side.learner.add(group(1), 2)
        report = await side.learner.update()
        assert (report.outcome, report.version, report.trajectories) == ("published", 2, 2)
        assert report.mismatch_k3 == 0.0, "no token is of the trainer's present weights, which were never served"
        assert side.trained == (7, 8, 100, 101)


@on_a_loop
async def test_without_training_everything_is_collected_and_nothing_learned(tmp_path: Path) -> None:
    async with running(config(tmp_path, mode="inference_only")) as side:
        await feed(side, [1, 2, 3], 0)
        await asyncio.sleep(0.01)
        status = side.learner.status()
        assert (status.updates, status.buffered, status.running, side.version) == (0, 6, False, 1)
        with pytest.raises(Conflict):
            await side.learner.update()
    async with running(config(tmp_path)) as side:
        await side.until(lambda: side.learner.status().updates == 1)


@on_a_loop
async def test_what_is_kept_on_the_drive_is_bounded_also_while_nothing_is_learned(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectories, "SEEN_IDS", 100)
        patch.setattr(rows_module, "MOST_PAST", 20)
        async with running(config(tmp_path, trajectory_buffer_size=8), start=False) as side:
            for number in range(100):
                await side.learner.add(group(number), 2)
            rows = side.learner._learner.ledger.saved.database.rows
            assert rows("SELECT count(*), count(body) FROM trajectories") == [(100, 28)]
            assert side.learner.status().trajectories_collected == 200
            held = side.learner.status().buffered
        async with running(config(tmp_path, trajectory_buffer_size=8), start=False) as side:
            assert side.learner.status().buffered == held == 8
            await side.learner.add(group(60), 2)
            assert side.learner.status().dropped_duplicate == 2, "what has gone from it is still known"


@on_a_loop
async def test_a_request_with_one_answer_gets_siblings_once(tmp_path: Path) -> None:
    async with running(config(tmp_path, siblings=4, update_frequency=4), lambda shift: "yes") as side:
        scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
        side.learner.record_prompt((1, 2, 3), scoring, SamplingParams(8), alone=True)
        await side.until(lambda: side.learner.status().updates == 1)
        assert side.learner.history[-1].trajectories == 4
        status = side.learner.status()
        assert (status.trajectories_collected, status.siblings_drawn) == (0, 4)
        side.learner.record_prompt((1, 2, 4), scoring, SamplingParams(8), alone=False)
        await side.learner.update()
        assert side.learner.status().siblings_drawn == 4, "one with siblings of its own gets none"


@on_a_loop
async def test_what_waits_for_a_full_drive_is_bounded(tmp_path: Path) -> None:
    """Nothing more is taken then, and nothing more compared, until the drive takes what waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "BEHIND", 2000)
        async with running(config(tmp_path, guard_prompts=1000, update_frequency=1000), start=False) as side:
            await side.learner.update(group(0))
            ledger, current = side.learner._learner.ledger, side.server.current()
            assert ledger._writer is not None and current is not None
            side.learner._loop.running = True
            with full_drive():
                for number in range(1, 200):
                    with pytest.raises(StorageError, match="disk is full"):
                        await side.learner.add(group(number), 2)
                assert ledger._writer.waiting_bytes < 3000
                held = side.learner.status().buffered
                assert held < 60
                assert side.learner.choose(current) is None
            await side.learner.add(group(999), 2)
            assert side.learner.choose(current) is not None
            side.learner._loop.running = False
        async with running(config(tmp_path, update_frequency=1000), start=False) as side:
            assert side.learner.status().buffered == held + 2, "what was taken is not lost"


@on_a_loop
async def test_several_steps_an_update_have_one_anchor_and_are_taken_back_together(tmp_path: Path) -> None:
    async with running(config(tmp_path, steps_per_update=3, decoupled=True), start=False) as side:
        report = await side.learner.update(group(1))
        assert (report.outcome, report.step, side.learner.status().step) == ("published", 3, 3)
        first, second, third = (batch.data for batch in side.client.passes)
        assert all(d.anchor == () for d in first)
        assert [d.anchor for d in second] == [d.anchor for d in third] == [(-1.0,) * len(d.weights) for d in first]
        state = side.client.trainers["policy"].state
        side.client.broken_gradients = True
        assert (await side.learner.update(group(2))).outcome == "rolled_back"
        assert side.client.trainers["policy"].state == state


@on_a_loop
async def test_the_rate_follows_its_schedule(tmp_path: Path) -> None:
    settings = config(tmp_path, schedule="linear", warmup_steps=2, decay_steps=2, rate_floor=0.5, learning_rate=1.0)
    async with running(settings, start=False) as side:
        for number in range(1, 6):
            await side.learner.update(group(number))
        assert side.client.rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5])

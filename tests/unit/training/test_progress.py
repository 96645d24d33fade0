"""The progress of an update, as the status has it: what is done of it grows, and there is none between two updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.types import EngineStats, PassUnderWay
from tests.unit.learning_fakes import config, died, group
from tests.unit.online_side import on_a_loop, running

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.mark.parametrize("steps", [1, 2])
def test_what_is_done_of_an_update_grows_to_all_of_it(tmp_path: Path, steps: int) -> None:
    @on_a_loop
    async def test(folder: Path) -> None:
        async with running(config(folder, steps_per_update=steps), start=False) as side:
            seen: list[tuple[float | None, float | None]] = []

            def look() -> None:
                status = side.learner.status()
                seen.append((status.update_done, status.update_left_s))

            run_pass, publish = side.client.run_pass, side.client.publish_trainer

            async def halfway(*args: Any, **more: Any) -> Any:
                look()
                side.client.stats = EngineStats(passes=(PassUnderWay("other", 0.9), PassUnderWay("policy", 0.5)))
                look()
                side.client.stats = EngineStats()
                return await run_pass(*args, **more)

            async def published(*args: Any) -> Any:
                look()
                return await publish(*args)

            side.client.run_pass = halfway  # type: ignore[method-assign]
            side.client.publish_trainer = published  # type: ignore[method-assign]
            assert (side.learner.status().update_done, side.learner.status().update_left_s) == (None, None)
            await side.learner.update([t for number in (1, 2) for t in group(number)])
            done = [share for share, _ in seen]
            assert done == sorted(done)
            whole = 3 * steps + 1  # a pass with gradients is three times the work of one without
            parts = [(3 * step + half) / whole for step in range(steps) for half in (0, 1.5)]
            assert done == pytest.approx([*parts, 3 * steps / whole, (3 * steps + 0.5) / whole, 1.0])
            assert seen[0][1] is None and all(left is not None and left >= 0 for _, left in seen[1:])
            assert seen[-1][1] == 0.0
            assert side.learner.status().update_done is None

    test(tmp_path)


@on_a_loop
async def test_another_attempt_begins_at_nothing(tmp_path: Path) -> None:
    async with running(config(tmp_path), start=False) as side:
        seen: list[float | None] = []
        run_pass = side.client.run_pass

        async def failing(*args: Any, **more: Any) -> Any:
            seen.append(side.learner.status().update_done)
            if len(seen) == 2:
                raise died()
            return await run_pass(*args, **more)

        side.client.run_pass = failing  # type: ignore[method-assign]
        side.learner.start()
        for number in (1, 2):
            await side.learner.add(group(number), 2)
        await side.until(lambda: side.learner.status().updates == 1)
        assert seen[0] == seen[2] == 0.0 and seen[1] == pytest.approx(0.75)

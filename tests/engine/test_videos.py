"""Videos through the real runner: with their frames, models say what mlx-vlm says, whatever else is served.

Tiny random models in float32, as in test_vision.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest

from mlx_tandem.adapters import formats
from mlx_tandem.model.vision import library
from mlx_tandem.model_folder import VISION_FAMILIES
from mlx_tandem.types import AdapterRef
from tests import tiny_models, tiny_vision
from tests.engine.mlx_engine import Engine, make_engine
from tests.engine.test_vision import TEXTS, ask, assert_agrees
from tests.tiny_vision import Clip, Oracle, Parts

pytestmark = pytest.mark.skipif(not library.is_installed(), reason="mlx-vlm is not installed")

FAMILIES = [name for name, family in VISION_FAMILIES.items() if family.videos]
TIMED = "qwen2_5_vl"
"""A family whose groups of frames lie on the axis of time by their seconds."""


@pytest.fixture(autouse=True)
def _compile_nothing() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Oracle, Path]:
    folder = tiny_vision.make(tmp_path_factory.mktemp("videos") / TIMED, TIMED)
    return make_engine(folder, num_blocks=96), Oracle(folder), folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_with_videos_what_mlx_vlm_says(family: str, tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", family)
    engine, oracle = make_engine(folder, num_blocks=64), Oracle(folder)
    one = ask(0, family, [TEXTS[0], Clip((1, 2, 3)), TEXTS[3]])
    two = ask(1, family, [TEXTS[1], Clip((4, 5)), TEXTS[3], 9, Clip((6,)), TEXTS[0]])
    text = ask(2, family, [TEXTS[2]], max_tokens=20)
    assert_agrees(engine.run([text, one, two], chunks=7, stagger=1), oracle, "batched, in chunks, with text and images")


def test_groups_of_frames_lie_where_their_seconds_are(timed: tuple[Engine, Oracle, Path]) -> None:
    """Also if the video takes more positions than its lines and columns."""
    engine, oracle, _ = timed
    times = (0, 0, 1), (0, 2, 4), (0, 9, 18)
    asked = [
        ask(i, TIMED, [TEXTS[0], Clip((1, 2, 3), t), TEXTS[3], 5, TEXTS[1]], max_tokens=9) for i, t in enumerate(times)
    ]
    loop = engine.run(asked, chunks=9)
    assert_agrees(loop, oracle, "by seconds")
    assert len({loop.logprobs[i, 0][0].model for i in range(len(times))}) == len(times)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (Clip((1, 2, 3), (0, 2, 4)), 56),
        (Clip((1, 2, 4), (0, 2, 4)), 40),
        (Clip((1, 2, 3), (0, 2, 5)), 40),
        (Clip((9, 2, 3), (0, 2, 4)), 8),
        (Clip((1, 2), (0, 2)), 40),
        (Clip((1, 2, 3, 4), (0, 2, 4, 6)), 55),
    ],
)
def test_frames_and_times_are_a_hit_up_to_the_first_that_differs(
    other: Clip, found: int, timed: tuple[Engine, Oracle, Path]
) -> None:
    """A video that goes on is found whole.

    A group has 15 tokens, 10 tokens come before the first, and a block has 8.
    """
    engine, oracle, _ = timed
    engine.built.runner.reset()
    loop = engine.loop()
    for i, clip in enumerate((Clip((1, 2, 3), (0, 2, 4)), other)):
        loop.add(ask(i, TIMED, [TEXTS[0], clip, TEXTS[3]]))
        loop.run()
    assert loop.cached[1] == found
    assert_agrees(loop, oracle, "prefixes of videos")


def test_a_preempted_video_is_computed_again(timed: tuple[Engine, Oracle, Path]) -> None:
    engine, oracle, _ = timed
    asked = [ask(i, TIMED, [TEXTS[i], Clip((i, 7)), TEXTS[3]], max_tokens=24) for i in range(3)]
    loop = engine.run(asked, blocks=16, chunks=9)
    assert loop.scheduler.queue.preemptions > 0
    assert_agrees(loop, oracle, "preempted")


def test_an_adapter_changes_the_language_model_only(timed: tuple[Engine, Oracle, Path], tmp_path: Path) -> None:
    """In one batch with the base, and not in its blocks."""
    engine, base, folder = timed
    changed = Oracle(folder)
    deltas = tiny_models.make_adapter(tmp_path / "a", engine.built.linears, "mlx-lm", rank=4, seed=1)
    loaded = formats.read(tmp_path / "a", engine.built.linears, max_rank=16, base_layers=2)
    engine.weights[loaded.info.digest] = loaded
    tiny_models.merge(changed.model, deltas)
    parts: Parts = [TEXTS[0], Clip((1, 2, 3), (0, 3, 6)), TEXTS[3]]
    plain, ref = ask(0, TIMED, parts), AdapterRef("a", 1, loaded.info.digest)
    adapted = msgspec.structs.replace(ask(1, TIMED, parts), adapter=ref)
    loop = engine.run([plain, adapted, ask(2, TIMED, [TEXTS[2]])], chunks=9)
    assert_agrees(loop, base, "beside an adapter", {0, 2})
    assert_agrees(loop, changed, "with an adapter", {1})
    assert loop.tokens[0, 0] != loop.tokens[1, 0], "the adapter changes nothing"

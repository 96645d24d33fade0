"""Videos of requests: which forms are read, and what prompts say of their frames' times."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import chat_messages, image_sources
from mlx_tandem.generation.video_parts import VideoSource
from mlx_tandem.generation.vision.messages import Made, Setup
from mlx_tandem.generation.vision.videos import BLOCK, Videos, check_video, count_of, units_of, videos_of
from mlx_tandem.limits import PARAMETERS
from mlx_tandem.model.vision import library

AT = "https://images.test/a.jpg"
FRAMES = "data:video/jpeg;base64,AAAA,BBBB,CCCC"
WHERE = "messages[0].content[0]"


def source(part: dict[str, Any]) -> VideoSource:
    """The video of a message with this part."""
    messages = [{"role": "user", "content": [part]}]
    (made,) = chat_messages(messages, images=True)
    assert made["content"] == [{"type": "video"}]
    (found,) = image_sources(messages, {})
    assert isinstance(found, VideoSource)
    return found


def refused(part: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as found:
        check_video(source(part))
    return found.value


def test_both_forms_have_the_same_frames() -> None:
    at_once = source({"type": "video_url", "video_url": {"url": FRAMES}, "fps": 3})
    listed = source({"type": "video", "video": [f"data:image/jpeg;base64,{b * 4}" for b in "ABC"], "fps": 3.0})
    for video, fields in ((at_once, ["video_url"] * 3), (listed, [f"video[{n}]" for n in range(3)])):
        check_video(video)
        assert (count_of(video), video.fps) == (3, 3.0)
        first, second = units_of(video, 2)
        assert [file.url[-4:] for file in (*first.files, *second.files)] == ["AAAA", "BBBB", "CCCC"]
        assert [file.field for file in (*first.files, *second.files)] == [f"{WHERE}.{field}" for field in fields]
        assert (first.first, second.first, second.frames) == (0, 2, 3)
        assert second.place(0) == f"{WHERE}.{fields[2]}: frame 2"


@pytest.mark.parametrize(
    "url", ["data:video/mp4;base64,AAAA", "https://videos.test/a.mp4", "", "file:///a.mp4", "data:image/jpeg;base64,A"]
)
@pytest.mark.parametrize("kind", ["video_url", "video"])
def test_other_videos_are_refused_with_words_that_ask_for_frames(kind: str, url: str) -> None:
    error = refused({"type": kind, kind: {"url": url} if kind == "video_url" else url})
    assert error.param == f"{WHERE}.{kind}"
    assert "only frames" in error.message and "send data:video/jpeg;base64," in error.message


def test_a_video_has_frames_and_a_possible_rate() -> None:
    assert refused({"type": "video", "video": []}).param == f"{WHERE}.video"
    for fps in (0, -1, PARAMETERS["fps"].high + 1, float("nan")):
        part = {"type": "video", "video": [AT], "fps": fps}
        with pytest.raises(InvalidRequest) as found:
            check_video(VideoSource(part["video"], fps, f"{WHERE}.video", WHERE))  # type: ignore[arg-type]
        assert found.value.param == f"{WHERE}.fps"
    with pytest.raises(InvalidRequest) as found:
        source({"type": "video", "video": [AT], "fps": "2"})
    assert found.value.param == f"{WHERE}.fps"


@pytest.mark.parametrize("kind", ["video_url", "video"])
def test_only_the_user_shows_videos(kind: str) -> None:
    part = {"type": kind, kind: {"url": FRAMES} if kind == "video_url" else [AT]}
    with pytest.raises(InvalidRequest, match="of the user only may hold videos") as found:
        chat_messages([{"role": "system", "content": [part]}], images=True)
    assert found.value.param == f"{WHERE}.{kind}"
    with pytest.raises(InvalidRequest, match="only text"):
        chat_messages([{"role": "user", "content": [part]}])


def timed(way: Any, count: int, fps: float | None, *, positions: float = 2.0) -> list[Made]:
    """The groups of two frames of a video of `count` frames."""
    groups = [Made(bytes([n]), b"", "", [6]) for n in range((count + 1) // 2)]
    return Videos(way, 2, 2.0, positions).timed(groups, VideoSource([AT], fps, "", ""), count)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("fps", [None, 0.5, 2.0, 3.0, 29.97])
def test_texts_are_those_of_mlx_vlm(count: int, fps: float | None) -> None:
    """Its metadata are what a client would say that has extracted the frames."""
    if not library.is_installed():
        pytest.skip("mlx-vlm is not installed")
    library.family("qwen3_vl")
    sys.modules.pop(name := "mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    reference: Any = import_module(name)
    groups = timed("texts", count, fps)
    metadata = {"frames_indices": list(range(count)), "fps": fps or 2.0}
    times = reference._video_group_timestamps(len(groups), 2, fps or 2.0, metadata)
    written = reference._timestamped_video_placeholder(times, 1, "<|vision_start|>", "<|vision_end|>")
    assert "".join(g.text for g in groups) == written.replace("<|placeholder|>", "<|video_pad|>")
    assert not any(g.time or g.follows for g in groups)


@pytest.mark.parametrize("fps", [0.3, 0.5, 1.0, 2.0, 3.0, 7.0, 24.0, 29.97, 98.0])
@pytest.mark.parametrize("positions", [2.0, 4.0, 25.0])
def test_seconds_become_the_positions_of_transformers(fps: float, positions: float) -> None:
    """It multiplies arrays of single precision, and cuts the fraction off."""
    step = np.float32(positions) * np.float32(2 / fps)
    expected = (np.arange(64).astype(np.float32) * step).astype(np.int64)
    groups = timed("seconds", 128, fps, positions=positions)
    assert [g.time for g in groups] == expected.tolist()
    assert [g.follows for g in groups] == [False] + [True] * 63
    assert {g.text for g in groups} == {"<|video_pad|>"}


def test_groups_are_numbered_whatever_the_rate_is() -> None:
    assert [g.time for g in timed("groups", 5, 30.0)] == [0, 1, 2]


def test_a_clock_has_minutes_and_seconds() -> None:
    """As in transformers, which cuts fractions off and writes a space between frames."""
    videos = Videos("clock", 1, 2.0, 0.0)
    groups = [Made(bytes([n]), b"", "", [6]) for n in range(3)]
    made = videos.timed(groups, VideoSource([AT], 0.03, "", ""), 3)
    assert [g.text for g in made] == [f"{at} <|image><|video|><image|>" for at in ("00:00", " 00:33", " 01:06")]
    assert videos.places == ("<|video|>",) and [g.digest for g in made] == [g.digest for g in groups]


def test_the_digest_tells_places_in_time_apart() -> None:
    """Since keys and values depend on them, and a video that goes on is found by its first groups."""
    slow, fast, longer = (timed("seconds", count, fps) for count, fps in ((4, 1.0), (4, 4.0), (6, 1.0)))
    assert slow[0].digest == fast[0].digest and slow[1].digest != fast[1].digest
    assert [g.digest for g in longer[:2]] == [g.digest for g in slow]
    apart = timed("seconds", 2, 1.0)[0]
    moved = timed("seconds", 4, 1000.0)[1]
    assert moved.time == apart.time == 0
    assert (
        moved.digest
        != Videos("seconds", 2, 2.0, 2.0)
        .timed([Made(bytes([1]), b"", "", [6])], VideoSource([AT], None, "", ""), 2)[0]
        .digest
    )


def test_a_folder_says_how_its_videos_are_shown() -> None:
    config = {"vision_config": {"tokens_per_second": 25}}
    own = videos_of(Setup("qwen2_5_vl", config, {}, {}, {"fps": 1, "temporal_patch_size": 4}))
    assert own == Videos("seconds", 4, 1.0, 25.0) and own.places == ("<|video_pad|>",)
    usual = videos_of(Setup("qwen3_vl", {"vision_config": {}}, {}, {}, {}))
    assert usual is not None and (usual.frames, usual.rate) == (2, 2.0)
    assert usual.places == (BLOCK, "<|video_pad|>")
    still = videos_of(Setup("gemma4", {"vision_config": {}}, {}, {}, {"max_soft_tokens": 70}))
    assert still is not None and (still.frames, still.rate) == (1, 2.0)
    assert videos_of(Setup("llava", {"vision_config": {}}, {}, {}, {})) is None

"""Videos of requests: the images of their frames, and how the model is told the times of groups of frames.

Texts and times have the form that the families' processors in transformers give them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack, unpack
from typing import Literal, NamedTuple

from msgspec import structs

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import ImageSource, Source
from mlx_tandem.generation.video_parts import VideoSource
from mlx_tandem.generation.vision.messages import Made, Setup
from mlx_tandem.model_folder import VISION_FAMILIES

FRAMES = "data:video/jpeg;base64,"
"""The beginning of a URL that holds frames. Commas separate the frames."""

TOKEN, CLOCK_TOKEN = "<|video_pad|>", "<|video|>"
"""The placeholders of videos in the Qwen families and in Gemma 4."""

BLOCK = f"<|vision_start|>{TOKEN}<|vision_end|>"
"""The text that chat templates of the Qwen families print for a video."""

USUAL_GROUP = 2
"""Frames of a group if the folder does not say how many."""

USUAL_RATE = 2.0
"""Frames per second of a video if neither its request nor the folder says how many: the families' own rate."""

USUAL_POSITIONS = 4.0
"""Positions per second if the folder does not say how many, as in transformers."""


class Unit(NamedTuple):
    """The files of one `types.Image`: an image, or a group of frames.

    The files of a group are those from number `first` on, from 0, of a video of `frames` frames. For an image, `frames`
    is 0.
    """

    files: Sequence[ImageSource]
    first: int = 0
    frames: int = 0

    def place(self, number: int) -> str:
        """Return the words that name file `number` in an error."""
        field = self.files[number].field
        return f"{field}: frame {self.first + number}" if self.frames else field


@dataclass(frozen=True)
class Videos:
    """How prompts for a folder's model show videos."""

    way: Literal["groups", "seconds", "texts", "clock"]
    """The way in which the family takes videos, as `VisionFamily.videos` names it."""

    frames: int
    """Frames of a group."""

    rate: float
    """Frames per second where a request has none."""

    positions: float
    """Positions on the axis of time in a second."""

    @property
    def places(self) -> tuple[str, ...]:
        """The texts that a chat template prints for a video; the longest that fits is replaced."""
        if self.way == "clock":
            return (CLOCK_TOKEN,)
        return (BLOCK, TOKEN) if self.way == "texts" else (TOKEN,)

    def timed(self, groups: Sequence[Made], video: VideoSource, count: int) -> list[Made]:
        """Return the groups of a video of `count` frames with their texts and their places in time."""
        rate = video.fps or self.rate
        if self.way == "clock":
            return [structs.replace(g, text=" " * (n > 0) + _clock(n / rate)) for n, g in enumerate(groups)]
        if self.way == "texts":
            numbers = [(n * self.frames, min((n + 1) * self.frames, count) - 1) for n in range(len(groups))]
            seconds = [(first / rate + last / rate) / 2 for first, last in numbers]
            return [
                structs.replace(g, text=f"<{at:.1f} seconds>{BLOCK}") for g, at in zip(groups, seconds, strict=True)
            ]
        times = list(range(len(groups)))
        if self.way == "seconds":
            # In single precision, as in transformers: a product close to an integer is rounded down.
            step = _single(_single(self.positions) * _single(self.frames / rate))
            times = [int(_single(n * step)) for n in times]
        return [_at(g, time, n > 0) for n, (g, time) in enumerate(zip(groups, times, strict=True))]


def videos_of(setup: Setup) -> Videos | None:
    """Return how videos are shown to the model of a folder whose numbers have been checked; None if it takes none."""
    way = VISION_FAMILIES[setup.family].videos
    if not way:
        return None
    values = setup.video_processor
    return Videos(
        way,
        1 if way == "clock" else int(_number(values.get("temporal_patch_size"), USUAL_GROUP)),
        _number(values.get("fps"), USUAL_RATE),
        _number(setup.config["vision_config"].get("tokens_per_second"), USUAL_POSITIONS),
    )


def _number(value: object, usual: float) -> float:
    """Return a setting if it is a number, else `usual`."""
    return float(value) if isinstance(value, int | float) else usual


def check_video(video: VideoSource) -> None:
    """Raise InvalidRequest, naming the field, unless a video is sent as frames and its rate is in range."""
    if video.fps is not None:
        limits.check("fps", video.fps, f"{video.place}.fps")
    if isinstance(video.given, str) and not video.given.startswith(FRAMES):
        raise InvalidRequest(
            f"{video.field}: this server reads no video files, only frames of videos: send {FRAMES}<frame>,<frame>,… "
            'with a JPEG image in base64 for each frame, or a part {"type": "video", "video": [<URL of an image>, …]}',
            param=video.field,
            code="unsupported_parameter",
        )
    if not video.given:
        raise InvalidRequest(f"{video.field} has no frames", param=video.field)


def count_of(video: VideoSource) -> int:
    """Return the number of frames of a video that `check_video` has accepted."""
    # The beginning of a URL with frames has one comma, so that there are as many commas as frames.
    return video.given.count(",") if isinstance(video.given, str) else len(video.given)


def units_of(source: Source, frames: int) -> Iterator[Unit]:
    """Yield the units of an image or a video, which are processed one by one. `frames`: the frames of a group."""
    if isinstance(source, ImageSource):
        yield Unit([source])
        return
    if isinstance(source.given, str):
        files = source.given[len(FRAMES) :].split(",")
        own = [ImageSource(f"data:image/jpeg;base64,{file}", source.field) for file in files]
    else:
        own = [ImageSource(url, f"{source.field}[{n}]") for n, url in enumerate(source.given)]
    for first in range(0, len(own), frames):
        yield Unit(own[first : first + frames], first, len(own))


def _clock(seconds: float) -> str:
    """Return the text that a prompt has for a frame of Gemma 4 at this time."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d} <|image>{CLOCK_TOKEN}<image|>"


def _at(group: Made, time: int, follows: bool) -> Made:
    """Return a group at its place in time. Its digest differs from that of the same group at another place."""
    digest = blake2b(group.digest + pack("<q?", time, follows), digest_size=16).digest()
    return structs.replace(group, digest=digest, text=TOKEN, time=time, follows=follows)


def _single(value: float) -> float:
    """Return the number of single precision that is nearest to a value."""
    (rounded,) = unpack("f", pack("f", value))
    return float(rounded)

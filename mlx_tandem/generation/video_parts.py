"""Videos in the messages of a conversation: the forms in which clients send them, and where their frames are."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct


class VideoUrl(Struct):
    """The address of a video: a `data:` URL with its frames."""

    url: str


class VideoUrlPart(Struct, tag="video_url", tag_field="type"):
    """One video of a message of the user in the form of vLLM's clients. `fps`: its frames per second."""

    video_url: VideoUrl
    fps: float | None = None


class FramesPart(Struct, tag="video", tag_field="type"):
    """One video of a message of the user, as a list of images. `fps`: its frames per second."""

    video: list[str] | str
    fps: float | None = None


class VideoSource(NamedTuple):
    """Where the frames of a video come from.

    `given` is a URL with all frames, or a list of the URLs of images. `fps` is the number of frames per second, None if
    the request does not give it. `field` is the field of the request that holds `given`, and `place` is the field of
    the part of the message.
    """

    given: str | list[str]
    fps: float | None
    field: str
    place: str


def video_source(part: dict[str, Any], place: str) -> VideoSource:
    """Return the video in a part of a message that has been checked. `place` is the part's field."""
    kind = part["type"]
    given = part["video_url"]["url"] if kind == "video_url" else part["video"]
    return VideoSource(given, part.get("fps"), f"{place}.{kind}", place)

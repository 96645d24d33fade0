"""The messages between the client of the image processor and its worker processes."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem.isolation.frames import Busy


class Setup(Struct, frozen=True, array_like=True):
    """The parts of a model folder that say how images are processed. The worker imports no code from the folder."""

    family: str  # model_type in config.json
    config: dict[str, Any]  # config.json
    image_processor: dict[str, Any]  # preprocessor_config.json, or the same part of processor_config.json
    processor: dict[str, Any]  # processor_config.json
    video_processor: dict[str, Any] = {}  # a part of processor_config.json, or video_preprocessor_config.json


class Job(Struct, frozen=True, array_like=True, tag=True):
    """One image in a file format, which may be written as base64."""

    data: bytes
    base64: bool


class GroupJob(Struct, frozen=True, array_like=True, tag=True):
    """The files of a group of frames, in a video of `count` frames. The last group may have fewer than the others."""

    frames: list[Job]
    count: int


class Made(Struct, frozen=True, array_like=True, tag=True):
    """An image, or a group of frames, as the model's processor made it.

    `arrays` is the content of a safetensors file. `text` takes the place of the template's placeholder in the prompt.
    Each placeholder token in `text` stands for a run of them, and `runs` has the lengths of these runs. `size` is the
    width and height of a group's frames as they were sent; (0, 0) for an image. `time` and `follows` are those of
    `types.Image`.
    """

    digest: bytes
    arrays: bytes
    text: str
    runs: list[int]
    size: tuple[int, int] = (0, 0)
    time: int = 0
    follows: bool = False


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """The reason why an image was not processed, which follows the name of its field in an error.

    `frame` is the number, within its group, of the frame that could not be used.
    """

    why: str
    frame: int = 0


decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job = msgspec.msgpack.Decoder(Job | GroupJob).decode
decode_answer = msgspec.msgpack.Decoder(Made | Failed | Busy).decode

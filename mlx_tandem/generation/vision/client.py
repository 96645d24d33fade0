"""The client of the processes that decode and process the images of requests for one model folder."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_tandem import limits, small_files
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.explain import installing
from mlx_tandem.generation.messages import ImageSource, Source
from mlx_tandem.generation.video_parts import VideoSource
from mlx_tandem.generation.vision.image_cache import ImageCache, key_of
from mlx_tandem.generation.vision.layouts import Family, family_of
from mlx_tandem.generation.vision.messages import Failed, GroupJob, Job, Made, Setup, decode_answer
from mlx_tandem.generation.vision.videos import Unit, Videos, check_video, count_of, units_of, videos_of
from mlx_tandem.isolation.frames import encode
from mlx_tandem.isolation.pool import Bounds, WorkerPool
from mlx_tandem.isolation.process import Lost, LostKind, Program
from mlx_tandem.model_folder import CONFIG, VISION_FAMILIES, check_processor, check_vision
from mlx_tandem.types import VisionInfo

if TYPE_CHECKING:
    from mlx_tandem.generation.vision.fetching import Fetcher

WORKERS = 2
"""Number of processes. When an image ends one of them, the other still serves other callers."""

PLACES = 4
"""Most requests whose images are fetched and processed at the same time, which bounds the memory for their arrays."""

SECONDS = 10.0
"""CPU seconds that decoding and processing one image may take."""

BOUNDS = Bounds(items=256, bytes=limits.MAX_WAITING_IMAGES, seconds=60.0)
"""Limits of the queue in front of the processes."""

IMAGE_PROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""The files of a folder that describe its image processor. The second one may contain the first."""

VIDEO_PROCESSOR = "video_preprocessor_config.json"
"""The file that describes a folder's video processor where PROCESSOR does not contain it. If neither exists, the values
of the image processor are used.
"""

ROOM = 1 << 20
"""Bytes that an answer may have besides the arrays."""

TEXT_ONLY = "this model reads text only"

LOST: Mapping[LostKind, str] = {
    "timeout": f"takes more than {SECONDS:g} s of CPU time to process",
    "memory": f"needs more than {limits.MAX_IMAGE_MEMORY >> 20} MB of memory to process",
    "died": "ends the process that decodes it",
}
"""The words of errors for each way in which a process can be lost."""

_DATA = re.compile(r"data:image/[a-z0-9.+*-]{1,32}(?:;[a-z0-9.+=-]{1,64})*;base64,", re.IGNORECASE)


class Images:
    """The images of requests for the model in a folder. It belongs to one event loop.

    No process is started before the first image. `family` is None if the folder's images cannot be served, and `videos`
    is None if its videos cannot. `cache` holds the images that were processed last.
    """

    def __init__(self, folder: Path, hosts: Sequence[str] = ()):
        """Read the folder's small files. Images are fetched from `hosts` only. Raises ModelError for damaged files."""
        self.family: Family | None = None
        self.videos: Videos | None = None
        self.cache = ImageCache(limits.MAX_KEPT_ARRAYS)
        self._why = self._no_videos = TEXT_ONLY
        self._pool: WorkerPool[Made | Failed] | None = None
        self._fetcher: Fetcher | None = None
        self._places = asyncio.Semaphore(PLACES)
        setup = _setup(folder)
        if setup is None:
            return
        if setup.family not in VISION_FAMILIES:
            self._why = f"images are not served for models of the type {setup.family[:64]!a}"
        elif find_spec("PIL") is None or find_spec("transformers") is None:
            self._why = f"images need packages that are not installed: {installing('vision')}"
        elif why := _fault(setup):
            self._why = f"images are not served: {why}"
        else:
            self._serve(setup, hosts)

    def _serve(self, setup: Setup, hosts: Sequence[str]) -> None:
        """Prepare the processes and the client that fetches."""
        self.family = family_of(setup)
        self.videos = videos_of(setup)
        what = "models" if self.videos is None else "this model"
        self._no_videos = f"videos are not served for {what} of the type {setup.family!a}, only images"
        program = Program(
            "mlx_tandem.generation.vision.worker",
            (str(SECONDS), str(limits.MAX_IMAGE_MEMORY)),
            decode_answer,
            limits.MAX_IMAGE_ARRAYS + ROOM,
            encode(setup),
            # Threads would take address space and time from serving; the hub is not asked for anything.
            {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        self._pool = WorkerPool("images", program, WORKERS, BOUNDS)
        if hosts:
            from mlx_tandem.generation.vision.fetching import Fetcher  # Its imports take time and memory.

            self._fetcher = Fetcher(hosts)

    def refusal(self, info: VisionInfo | None) -> str:
        """Return why a request with images is refused; empty if it is not. `info` is what the engine says."""
        if self.family is None:
            return self._why
        return TEXT_ONLY if info is None else info.refusal

    @property
    def places(self) -> tuple[str, ...]:
        """The texts that chat templates print for images and videos."""
        assert self.family is not None
        return (*(() if self.videos is None else self.videos.places), self.family.placeholder)

    def check(self, sources: Sequence[Source], info: VisionInfo | None) -> None:
        """Raise InvalidRequest naming the field of the first image or video that the model cannot be given."""
        images = frames = 0
        refusal = self.refusal(info)
        for source in sources:
            why, field = refusal, source.field
            if isinstance(source, ImageSource):
                images += 1
            elif not why:
                why = self._no_videos if self.videos is None or info is None or info.video_token < 0 else ""
            if why:
                raise InvalidRequest(f"{field}: {why}", param=field, code="unsupported_parameter")
            if isinstance(source, VideoSource):
                check_video(source)
                frames += count_of(source)
            if images > limits.MAX_IMAGES:
                raise InvalidRequest(f"{field}: a request has at most {limits.MAX_IMAGES} images", param=field)
            if frames > limits.MAX_FRAMES:
                raise InvalidRequest(
                    f"{field}: the videos of a request have at most {limits.MAX_FRAMES} frames", param=field
                )

    async def made(self, sources: Sequence[Source]) -> list[list[Made]]:
        """Return what the model's processor makes of each image and video, for which `check` has raised no error.

        An image becomes one piece, and a video one for each group of frames.

        Raises:
            InvalidRequest: An image or a video cannot be used; the error names its field.
            Overloaded: Too many images wait.
            EngineError: No process can be started.
        """
        async with self._places:
            return await self._all_made(sources)

    async def _all_made(self, sources: Sequence[Source]) -> list[list[Made]]:
        """Return what the processor makes of images and videos, one after the other. Raises the errors of `made`."""
        made: list[list[Made]] = []
        size = 0
        for source in sources:  # A request uses one process at a time.
            own: list[Made] = []
            for unit in units_of(source, 1 if self.videos is None else self.videos.frames):
                piece = await self._made(unit)
                size += len(piece.arrays)
                if size > limits.MAX_REQUEST_ARRAYS:
                    raise InvalidRequest(
                        f"{source.field}: the images and frames of a request may become at most "
                        f"{limits.MAX_REQUEST_ARRAYS} bytes of arrays: send fewer or smaller ones",
                        param=source.field,
                    )
                if own and piece.size != own[0].size:
                    raise InvalidRequest(
                        f"{unit.place(0)} has another size than those before it", param=unit.files[0].field
                    )
                own.append(piece)
            if isinstance(source, VideoSource) and self.videos is not None:
                own = self.videos.timed(own, source, count_of(source))
            made.append(own)
        return made

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await self._pool.close()

    async def _made(self, unit: Unit) -> Made:
        """Return what the processor makes of one image or group of frames. Raises the errors of `made`."""
        assert self._pool is not None
        files = [await self._job(file) for file in unit.files]
        job = GroupJob(files, unit.frames) if unit.frames else files[0]
        key = key_of(job)
        if (made := self.cache.get(key)) is not None:
            return made
        answer = await self._pool.ask(encode(job))
        if isinstance(answer, Made):
            self.cache.keep(key, answer)
            return answer
        why, number = (LOST[answer.kind], 0) if isinstance(answer, Lost) else (answer.why, answer.frame)
        raise InvalidRequest(f"{unit.place(number)} {why}", param=unit.files[number].field)

    async def _job(self, source: ImageSource) -> Job:
        """Return the job with the image's file, which the request holds or which is fetched. Raises InvalidRequest."""
        url, field = source
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            head = _DATA.match(url, 0, 256)
            if head is None:
                raise InvalidRequest(f"{field} must begin with data:image/…;base64,", param=field)
            if (len(url) - head.end()) * 3 // 4 > limits.MAX_IMAGE_BYTES + 2:
                raise InvalidRequest(f"{field} has over {limits.MAX_IMAGE_BYTES} bytes", param=field)
            return Job(url[head.end() :].encode(), True)
        if scheme in ("http", "https"):
            if self._fetcher is None:
                why = "this server fetches no images, as --allow-image-hosts names no host; send a data: URL"
                raise InvalidRequest(f"{field}: {why}", param=field)
            return Job(await self._fetcher.fetch(url, field), False)
        raise InvalidRequest(f"{field} must be a data: or an http(s) URL", param=field)


def _setup(folder: Path) -> Setup | None:
    """Return what a folder says about images; None for a model that reads text only. Raises ModelError."""
    config = small_files.read_object(folder / CONFIG) or {}
    family = config.get("model_type")
    if not isinstance(family, str) or not isinstance(config.get("vision_config"), dict):
        return None
    processor = small_files.read_object(folder / PROCESSOR) or {}
    image_processor = small_files.read_object(folder / IMAGE_PROCESSOR)
    if image_processor is None:
        image_processor = processor.get("image_processor")
    if not isinstance(image_processor, dict):
        image_processor = {}  # The family's usual values.
    video_processor = processor.get("video_processor") or small_files.read_object(folder / VIDEO_PROCESSOR)
    if not isinstance(video_processor, dict):
        video_processor = image_processor
    return Setup(family, config, image_processor, processor, video_processor)


def _fault(setup: Setup) -> str:
    """Return which number of a folder lies outside its range; empty if none does."""
    try:
        check_vision(setup.config, CONFIG)
        check_processor(setup.processor, PROCESSOR)
        parts = [("image_processor", setup.image_processor, IMAGE_PROCESSOR)]
        if VISION_FAMILIES[setup.family].videos:
            parts.append(("video_processor", setup.video_processor, VIDEO_PROCESSOR))
        for name, values, file in parts:
            inner = values is setup.processor.get(name)
            check_processor(values, PROCESSOR if inner else file, name if inner else "")
    except ModelError as e:
        return e.message
    return ""

"""The program that decodes and processes images: `python -m mlx_tandem.generation.vision.worker FD SECONDS BYTES`.

The first frame on the socket FD is the setup, and each further one an image or a group of a video's frames. The kernel
ends the process when one of these takes more than SECONDS of CPU time. The process may use BYTES of memory besides what
it has with its processor loaded. It runs at a lower priority than the server.
"""

from __future__ import annotations

import binascii
import os
import signal
import sys
from hashlib import blake2b

import numpy as np
from PIL.Image import Image
from safetensors.numpy import save

from mlx_tandem.generation.vision.decoding import BadImage, decoded
from mlx_tandem.generation.vision.frames import BadFrame, frame_processor
from mlx_tandem.generation.vision.layouts import family_of
from mlx_tandem.generation.vision.messages import Failed, GroupJob, Job, Made, Setup, decode_job, decode_setup
from mlx_tandem.generation.vision.processors import Processor
from mlx_tandem.isolation.frames import receive
from mlx_tandem.isolation.program import connect, limit_memory, out_of_memory, say_busy, serve, time_limit
from mlx_tandem.limits import MAX_IMAGE_ARRAYS, MAX_IMAGE_PLACEHOLDERS

REAL_SECONDS_PER_SECOND = 20.0
"""Seconds of real time that one second of CPU time may take while other programs use the machine."""

NICENESS = 5
"""Added to the process's nice value."""


class Worker:
    """A folder's image processor, which answers images with their arrays and texts."""

    def __init__(self, setup: Setup, seconds: float):
        self._setup = setup
        self._seconds = seconds
        self._family = family_of(setup)
        self._processor = Processor(setup)
        self._frames = frame_processor(setup)

    def answer(self, raw: bytes) -> Made | Failed:
        """Return what the model's processor makes of an encoded job. A lack of memory ends the process."""
        try:
            with time_limit(signal.ITIMER_PROF, self._seconds):
                job = decode_job(raw)
                return self._group(job) if isinstance(job, GroupJob) else self._made(job)
        except BadImage as e:
            return Failed(str(e), e.frame if isinstance(e, BadFrame) else 0)
        except MemoryError:
            out_of_memory()
        except Exception:  # The folder's values may let the processor raise anything.
            return Failed("cannot be processed by the model's processor")

    def _made(self, job: Job) -> Made:
        """Return what is made of an image. Raises BadImage."""
        arrays = self._processor(_image(job))
        layout = self._family.layout(self._setup, self._processor.patch, self._processor.merge, arrays)
        if min(layout.runs, default=0) < 1 or sum(layout.runs) > MAX_IMAGE_PLACEHOLDERS:
            raise BadImage("takes no possible number of tokens by the settings of the model's folder")
        kept = {name: array for name, array in arrays.items() if name not in self._family.unused}
        return Made(*self._saved(kept), layout.text, layout.runs)

    def _group(self, job: GroupJob) -> Made:
        """Return what is made of a group of frames, without the text, which the client adds. Raises BadImage."""
        assert self._frames is not None, "the client refuses videos for this family"
        frames: list[Image] = []
        for number, each in enumerate(job.frames):
            try:
                frames.append(_image(each))
            except BadImage as e:
                raise BadFrame(str(e), number) from None
        arrays = self._frames(frames, job.count)
        return Made(*self._saved(arrays), "", [self._frames.tokens(arrays)], frames[0].size)

    def _saved(self, arrays: dict[str, np.ndarray]) -> tuple[bytes, bytes]:
        """Return the digest of arrays and their safetensors file. Raises BadImage if they have too many bytes."""
        size = sum(array.nbytes for array in arrays.values())
        if size > MAX_IMAGE_ARRAYS:
            raise BadImage(
                f"becomes {size} bytes of arrays, but at most {MAX_IMAGE_ARRAYS} are allowed: send a smaller image"
            )
        saved = save(arrays)
        digest = blake2b(self._setup.family.encode(), digest_size=16)
        digest.update(saved)
        return digest.digest(), saved


def _image(job: Job) -> Image:
    """Return the image in a file. Raises BadImage."""
    try:
        data = binascii.a2b_base64(job.data, strict_mode=True) if job.base64 else job.data
    except binascii.Error:
        raise BadImage("is not base64") from None
    return decoded(data)


def main(fd: str, seconds: str, size: str) -> None:
    """Load the processor and answer images until the socket is closed."""
    sock = connect(fd)
    os.nice(NICENESS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # transformers prints advice.
    stream = sock.makefile("rb")
    worker = Worker(decode_setup(receive(stream)), float(seconds))
    limit_memory(int(size))
    say_busy(sock, REAL_SECONDS_PER_SECOND * float(seconds))
    serve(sock, stream, worker.answer)


if __name__ == "__main__":
    main(*sys.argv[1:])

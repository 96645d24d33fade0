"""Processed images of earlier requests, so that the turns of a conversation do not decode the same image again."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from mlx_tandem.generation.vision.messages import GroupJob, Job, Made


def key_of(job: Job | GroupJob) -> bytes:
    """Return the digest of an image or a group of frames as its request gives it.

    Base64 and bytes of one file have different digests. The digest of a group of frames also depends on the number of
    frames of its video, since the limits on a video's pixels are shared among them.
    """
    if isinstance(job, GroupJob):
        files = b"".join(map(key_of, job.frames))
        return blake2b(files, digest_size=32, person=b"group", salt=job.count.to_bytes(8)).digest()
    return blake2b(job.data, digest_size=32, person=b"base64" if job.base64 else b"bytes").digest()


class ImageCache:
    """A cache of what the processor made of the images that were used last, by the digests of `key_of`.

    Attributes:
        nbytes: Bytes of the arrays that are kept, at most `limit`.
        hits, misses: How many images were found and not found, since start.
    """

    def __init__(self, limit: int):
        self.nbytes = self.hits = self.misses = 0
        self._limit = limit
        self._made: OrderedDict[bytes, Made] = OrderedDict()  # the last used image is the last

    def get(self, key: bytes) -> Made | None:
        """Return what was made of an image; None if it is not kept."""
        made = self._made.get(key)
        if made is None:
            self.misses += 1
            return None
        self.hits += 1
        self._made.move_to_end(key)
        return made

    def keep(self, key: bytes, made: Made) -> None:
        """Keep an image and drop those that were not used for longest, unless it is too large by itself."""
        if len(made.arrays) > self._limit or key in self._made:
            return
        self._made[key] = made
        self.nbytes += len(made.arrays)
        while self.nbytes > self._limit:
            _, oldest = self._made.popitem(last=False)
            self.nbytes -= len(oldest.arrays)

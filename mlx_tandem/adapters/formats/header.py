"""Reads the header of a safetensors file: which tensors it holds, and where."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from mlx_tandem.adapters.formats import files
from mlx_tandem.adapters.formats.parts import refuse

MAX_HEADER_BYTES = 64 << 20
"""Most bytes of a header."""

DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per number of the types that are read."""


class Tensor(NamedTuple):
    """A tensor's type, shape and place in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file


def read_header(fd: int, name: str) -> dict[str, Tensor]:
    """Return the types, shapes and places of all tensors of an open file; no tensor data is read.

    Raise ModelError naming `name` if the file is unsound.
    """
    size = os.fstat(fd).st_size
    if size < 8:
        refuse(name, None, "is not a safetensors file")
    length = int.from_bytes(files.read_exactly(fd, 0, 8, name).tobytes(), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        refuse(name, None, "is not a safetensors file, or its header is cut off or too large")
    found: dict[str, Tensor] = {}
    try:
        # The library opens files by name, and only /dev/fd names the very file that was checked. It reads by pread and
        # not by mmap, because a file that is cut short while it is mapped kills the process.
        with safe_open(f"/dev/fd/{fd}", framework="numpy", backend="pread") as f:
            at = 8 + length
            for key in f.offset_keys():  # in the order of places; the library has checked that there are no gaps
                part = f.get_slice(key)
                shape = tuple(int(n) for n in part.get_shape())
                dtype = str(part.get_dtype())
                if dtype not in DTYPES:
                    refuse(name, key, f"has dtype {dtype}; F32, F16 and BF16 are read")
                found[key] = Tensor(dtype, shape, at)
                at += math.prod(shape) * DTYPES[dtype]
    except SafetensorError as e:
        refuse(name, None, f"is not a valid safetensors file ({str(e).splitlines()[0][:120]})")
    except OSError as e:
        refuse(name, None, f"cannot be read: {e.strerror}")
    if at != size:
        refuse(name, None, "has a header that does not describe the whole file")
    if not found:
        refuse(name, None, "holds no tensors: the adapter is empty")
    return found

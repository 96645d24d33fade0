"""The header of a safetensors file: which tensors it holds, and where."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from mlx_tandem.adapters.formats import files
from mlx_tandem.adapters.formats.parts import refuse

MAX_HEADER_BYTES = 64 << 20
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file


def read_header(fd: int, name: str) -> dict[str, Tensor]:
    """Names, dtypes, shapes and places of all tensors, from the descriptor's own header; no data is read."""
    size = os.fstat(fd).st_size
    if size < 8:
        refuse(name, None, "is not a safetensors file")
    length = int.from_bytes(files.read_exactly(fd, 0, 8, name).tobytes(), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        refuse(name, None, "is not a safetensors file, or its header is cut off or too large")
    found: dict[str, Tensor] = {}
    try:
        # Through /dev/fd: the library opens by name, and only the descriptor names the file that was checked.
        # pread, not mmap: a file cut short under a mapping kills the process.
        with safe_open(f"/dev/fd/{fd}", framework="numpy", backend="pread") as f:
            at = 8 + length
            for key in f.offset_keys():  # by place; the library has made sure that there are no gaps
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

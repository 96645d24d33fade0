"""Memory of GPUs that other processes on the same machine write into (CUDA's interprocess handles).

The memory is reserved for as long as the process lives, since another process may write into it until then.
"""

from __future__ import annotations

import ctypes
from hashlib import blake2b
from pathlib import Path

import mlx.core as mx
import numpy as np

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE of the CUDA driver API."""

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS of the CUDA driver API."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle of the CUDA driver API."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _DriverError(Exception):
    """Raised when the driver refuses a call."""


def shared_memory(group: mx.distributed.Group, nbytes: int, driver: str = "libcuda.so.1") -> list[int] | None:
    """Reserve `nbytes` of zeros on the GPU of each rank, and return their addresses in this process, by rank.

    Every rank of the group has to call it. It returns None on all ranks if they run on several machines, or if the
    driver of one refuses.
    """
    handle, address = b"", 0
    try:
        cuda = ctypes.CDLL(driver)
        handle, address = _reserve(cuda, nbytes)
    except (OSError, _DriverError):
        cuda = None
    offers = _offers(group, handle)
    if offers is None or cuda is None:
        return None
    addresses = []
    try:
        for rank, offer in enumerate(offers):
            addresses.append(address if rank == group.rank() else _opened(cuda, offer))
    except _DriverError:
        addresses = []
    have = np.array(mx.distributed.all_sum(mx.array(len(addresses)), group=group))
    return addresses if have == group.size() ** 2 else None


def _offers(group: mx.distributed.Group, handle: bytes) -> list[bytes] | None:
    """Return the handles of all ranks; None if a rank has none or is on another machine."""
    place = blake2b(_BOOT.read_bytes() if _BOOT.exists() else b"", digest_size=16).digest()
    own = np.frombuffer(bytes([bool(handle)]) + place + handle.ljust(_HANDLE_BYTES, b"\0"), np.uint8)
    every = mx.distributed.all_gather(mx.array(own.astype(np.int32))[None], group=group)
    rows = [row.tobytes() for row in np.array(every).astype(np.uint8)]
    if any(row[0] != 1 or row[1:17] != place for row in rows):
        return None
    return [row[17:] for row in rows]


def _reserve(cuda: ctypes.CDLL, nbytes: int) -> tuple[bytes, int]:
    """Return the handle and the address of new memory that holds zeros. Raise _DriverError."""
    context, address, handle = ctypes.c_void_p(), ctypes.c_uint64(), _Handle()
    size = ctypes.c_size_t(nbytes)
    _check(cuda.cuInit(0))
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))  # MLX uses this context
    _check(cuda.cuCtxSetCurrent(context))
    _check(cuda.cuMemAlloc_v2(ctypes.byref(address), size))
    _check(cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(0), size))
    _check(cuda.cuCtxSynchronize())
    _check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), address))
    return bytes(handle.reserved), address.value


def _opened(cuda: ctypes.CDLL, offer: bytes) -> int:
    """Return the address of another rank's memory in this process. Raise _DriverError."""
    handle, address = _Handle(), ctypes.c_uint64()
    ctypes.memmove(ctypes.byref(handle), offer, _HANDLE_BYTES)
    open_handle = cuda.cuIpcOpenMemHandle_v2
    open_handle.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    _check(open_handle(ctypes.byref(address), handle, _LAZY_PEER_ACCESS))
    return address.value


def _check(status: int) -> None:
    if status:
        raise _DriverError(f"the CUDA driver returned {status}")

"""MLX's back end for NVIDIA's GPUs: kernels of ours, graphs that run one after the other, and slow launches."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from pathlib import Path

import mlx.core as mx

from mlx_tandem.model.backend import base, peers
from mlx_tandem.model.device import Limit, available_on_linux

_VERSION = Path("/proc/driver/nvidia/version")

_RELEASE_THRESHOLD = 4
"""CU_MEMPOOL_ATTR_RELEASE_THRESHOLD of CUmemPool_attribute in the CUDA driver API."""


class Cuda(base.Backend):
    """The back end for NVIDIA's GPUs."""

    def driver(self) -> str:
        """Return the version of the driver."""
        with contextlib.suppress(OSError):
            return _VERSION.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        return ""

    def free_memory(self) -> Limit:
        """Return what the GPU has free, or all of its memory if the driver does not say."""
        info = mx.device_info()
        for key in ("free_memory", "total_memory"):
            if info.get(key):
                return Limit(int(info[key]), "what the GPU has free", shared=False)
        return Limit(available_on_linux(), "what the machine has free", shared=False)

    def keep_freed_memory(self, most: int) -> bool:
        """Have the driver keep what MLX frees. By default it returns such memory to the system as soon as anybody waits
        for the device, and mapping a gigabyte again takes tens of milliseconds.
        """
        return keep_freed_memory(most)

    def shared_memory(self, group: mx.distributed.Group, nbytes: int) -> list[int] | None:
        """Return the addresses of memory that the GPUs of a machine share, by rank."""
        return peers.shared_memory(group, nbytes)


def keep_freed_memory(most: int, driver: str = "libcuda.so.1") -> bool:
    """Have the library `driver` keep freed memory, up to `most` bytes in use and freed; return whether it agreed."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return False
    number, pool, threshold = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(most)
    return not (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(number), 0)
        or cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), number)
        or cuda.cuMemPoolSetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(threshold))
    )


CUDA = Cuda(
    name="cuda",
    kernels=base.Kernels(
        target="cuda",
        joins_operations=True,  # the host needs microseconds to launch each operation, more than many of them take
        has_matrix_words=True,
    ),
    steps=base.Steps(
        numbers_as_one=True,  # each array that the host has made is moved by itself (`model/inputs.py`)
        # The device has to see what the host writes in the order in which the host writes it, which only x86 promises.
        may_wait_for_numbers=platform.machine() in ("x86_64", "AMD64"),
        # A forward is one graph, which holds the inputs of all its operations until it is done. On an H200 three layers
        # keep the device busy while the host builds the next ones.
        long_forward=base.LongForward(tokens=1024, group=3),
        drive_bytes=64 << 20,
    ),
    products=base.Products(
        timed_apart=True,  # launching a small product can take longer than computing it
        alike=0.02,  # times vary less where device and host are timed apart
        tile_sizes=(1, 8, 16, 32, 64, 128, 256, 512),
    ),
    arithmetic=base.Arithmetic(),
    memory=base.Memory(chunk_tokens=(4096, 2048, 1024)),  # an H200 is at its best from about 4,096 on
    learning=base.Learning(
        micro_batch_tokens=1536,
        forward_layers=3,
        step_chunks=4,
        attention_has_gradient=True,
        few_shapes=True,  # cuDNN makes a plan for each shape in tens of milliseconds
        masks_are_slow=True,  # pages have many shapes and masks of their own, for which there is no fused attention
        compiles_for_long=True,  # in the first pass it would take half a minute in which nobody gets a token
    ),
    measuring=base.Measuring(),
)

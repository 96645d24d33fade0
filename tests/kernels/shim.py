"""Kernels of the dialect compiled with g++ and run on the CPU, called like those that MLX compiles for a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import mlx.core as mx
import numpy as np

from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Shaped, Source

HEADER = Path(__file__).with_name("shim.h")
COMPILER = shutil.which("g++")
# -O0: most kernels run for less time than it takes to optimise them. -nostdlib: linking libraries takes time too, and
# this process has loaded them. -U_FORTIFY_SOURCE: its checks reject the jumps between stacks.
FLAGS = "-std=c++17 -O0 -shared -nostdlib -fPIC -w -U_FORTIFY_SOURCE".split()
GUARD = 256
"""Bytes before and after each buffer: NaN for who reads there, and looked at again for who has written there."""

Order = Literal["together", "backwards", "apart"]
ORDERS = get_args(Order)
"""Of the threads of a block: all turn by turn, in either direction, or warp by warp."""

_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.int32: "int",
    mx.uint32: "uint",
    mx.uint8: "unsigned char",
    mx.uint64: "unsigned long",
}


class KernelError(Exception):
    pass


def maker(order: Order = "together") -> Make:
    """Return what makes kernels. A kernel that lacks a barrier gives something else in another order."""

    def make(source: Source) -> Kernel:
        name = source.name

        def call(
            arrays: Sequence[mx.array],
            template: Mapping[str, Constant],
            groups: tuple[int, int, int],
            threads: int,
            shaped: Sequence[Shaped],
        ) -> list[mx.array]:
            types = [_TYPES[a.dtype] for a in arrays], [_TYPES[dtype] for _, dtype in shaped]
            library = _library(name, _program(source, template, *types))
            given = [_guarded(_bytes(a)) for a in arrays]
            shapes = [np.array(a.shape, np.int32) for a in arrays]
            made = [_guarded(b"\xff" * (int(np.prod(shape)) * dtype.size)) for shape, dtype in shaped]
            pointers = [
                p for room, shape in zip(given, shapes, strict=True) for p in (_address(room), shape.ctypes.data)
            ]
            pointers += [_address(room) for room in made]
            library.run.restype = ctypes.c_char_p
            failure = library.run(
                (ctypes.c_void_p * len(pointers))(*pointers),
                (ctypes.c_int * 3)(*groups),
                threads,
                ORDERS.index(order),
                ctypes.byref(_stacks()),
            )
            if failure:
                raise KernelError(f"{name}: {failure.decode()}")
            for room in given + made:
                if (room[:GUARD] != 255).any() or (room[len(room) - GUARD :] != 255).any():
                    raise KernelError(f"{name}: wrote outside of a buffer")
            for name_of, array, room in zip(source.inputs, arrays, given, strict=True):
                if name_of in source.writes:
                    _overwrite(array, room[GUARD : len(room) - GUARD])
            return [_array(room, *s) for room, s in zip(made, shaped, strict=True)]

        return call

    return make


def _program(
    source: Source, template: Mapping[str, Constant], input_types: Sequence[str], output_types: Sequence[str]
) -> str:
    lines = [f"#define ROOM_BYTES {source.room}", f'#include "{HEADER.name}"', source.functions]
    lines.append("static void kernel(void** given) {")
    for i, (name, kind) in enumerate(zip(source.inputs, input_types, strict=True)):
        lines.append(f"  auto {name} = (const {kind}*)given[{2 * i}];")
        lines.append(f"  auto {name}_shape = (const int*)given[{2 * i + 1}]; (void){name}_shape;")
    for i, (name, kind) in enumerate(zip(source.outputs, output_types, strict=True)):
        lines.append(f"  auto {name} = ({kind}*)given[{2 * len(source.inputs) + i}];")
    for name, value in template.items():
        if isinstance(value, mx.Dtype):
            lines.append(f"  using {name} = {_TYPES[value]};")
        else:
            lines.append(f"  constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};")
    lines += ["  START", source.body, "}"]
    lines.append('extern "C" const char* run(void** given, const int* groups, int threads, int order, char* stacks) {')
    lines.append("  return shim::launch(kernel, given, groups, threads, order, stacks);\n}")
    return "\n".join(lines)


@cache
def _stacks() -> ctypes.c_char:
    """Return the beginning of room for the stacks of all threads of a block. Its pages are mapped when they are used.
    Mapping them takes longer than most kernels do: all kernels share them."""
    room = mmap.mmap(-1, 1024 * (128 << 10))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        room.madvise(mmap.MADV_NOHUGEPAGE)
    return ctypes.c_char.from_buffer(room)


@cache
def _folder() -> Path:
    """Return the folder of compiled kernels, which all processes of tests share, today's and tomorrow's."""
    known = hashlib.sha256(HEADER.read_bytes())
    known.update(" ".join([platform.platform(), COMPILER or "", *FLAGS]).encode())
    folder = Path(tempfile.gettempdir(), f"tandem-kernels-{os.getuid()}", known.hexdigest()[:16])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _library(name: str, program: str) -> ctypes.CDLL:
    built = _folder() / f"{name}-{hashlib.sha256(program.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        new = built.with_suffix(f".{os.getpid()}")
        command = [COMPILER or "g++", *FLAGS, "-I", str(HEADER.parent), "-x", "c++", "-", "-o", str(new)]
        done = subprocess.run(command, input=program, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(f"{name} does not compile:\n{done.stderr[:4000]}")
        new.rename(built)
    return ctypes.CDLL(str(built))


def _bytes(array: mx.array) -> bytes:
    wide = array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array
    return np.ascontiguousarray(np.array(wide)).tobytes()


def _overwrite(array: mx.array, content: np.ndarray) -> None:
    """In place, as kernels do that write an input."""
    words = array.view(mx.uint16)
    mx.eval(words)
    ctypes.memmove(np.array(words, copy=False).__array_interface__["data"][0], content.ctypes.data, len(content))


def _guarded(content: bytes) -> np.ndarray:
    """Aligned to 64 bytes behind the guard, which the pointer to it skips."""
    room = np.full(len(content) + 2 * GUARD + 64, 255, np.uint8)
    start = -room.ctypes.data % 64
    room = room[start : start + len(content) + 2 * GUARD]
    room[GUARD : GUARD + len(content)] = np.frombuffer(content, np.uint8)
    return room


def _address(room: np.ndarray) -> int:
    return int(room.ctypes.data) + GUARD


def _array(room: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    content = room[GUARD : len(room) - GUARD]
    return mx.array(content.copy()).view(dtype).reshape(shape)

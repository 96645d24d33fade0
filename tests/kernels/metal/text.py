"""The text that MLX would hand to Metal's compiler for one call of a kernel, and what that call needs of the device.

MLX generates the signature from the inputs (`write_signature` in mlx/backend/common/metal_kernel.cpp): an input of
fewer than eight elements lies in the constant address space, a scalar is a reference, and `NAME_shape`, `NAME_strides`,
`NAME_ndim` and thread attributes become arguments where the body names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Shaped, Source

CONSTANT_ELEMENTS = 8
"""Elements from which on an input is in device memory (`max_constant_array_size`)."""

ATTRIBUTES = {
    "thread_position_in_threadgroup": "uint3",
    "threads_per_threadgroup": "uint3",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "thread_position_in_grid": "uint3",
}

TYPES = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int",
    mx.uint32: "uint",
    mx.uint8: "uchar",
}


@dataclass(frozen=True)
class Call:
    """One kernel as Metal would get it. `buffers`: arguments that take one of Metal's buffer slots."""

    name: str
    text: str
    buffers: int
    threads: int


def call_of(
    source: Source,
    inputs: Sequence[mx.array],
    template: Mapping[str, Constant],
    threads: int,
    outputs: Sequence[Shaped],
) -> Call:
    """Return the text of one call. Template values become constants and types in the body."""
    body = dialect._METAL_START + source.body
    arguments: list[str] = []
    for name, array in zip(source.inputs, inputs, strict=True):
        place = "constant" if array.size < CONSTANT_ELEMENTS else "device"
        arguments.append(f"const {place} {TYPES[array.dtype]}{'*' if array.ndim else '&'} {name}")
        if array.ndim:
            infos = {f"{name}_shape": "int*", f"{name}_strides": "int64_t*", f"{name}_ndim": "int&"}
            arguments += [f"const constant {kind} {info}" for info, kind in infos.items() if info in body]
    arguments += [f"device {TYPES[kind]}* {name}" for name, (_, kind) in zip(source.outputs, outputs, strict=True)]
    buffers = len(arguments)
    arguments += [f"{kind} {name}" for name, kind in ATTRIBUTES.items() if name in body]
    values = "\n".join(_value(name, value) for name, value in template.items())
    signature = ",\n  ".join(arguments)
    text = (
        f"{dialect._METAL}{source.functions}\n__kernel void {source.name}(\n  {signature}) {{\n{values}\n{body}\n}}\n"
    )
    return Call(source.name, text, buffers, threads)


def _value(name: str, value: Constant) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {TYPES[value]};"
    return f"  constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"


class Recorder:
    """A maker of kernels that compute nothing: each call gives zeros, and its text is kept once."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}

    @property
    def make(self) -> Make:
        def make(source: Source) -> Kernel:
            def kernel(
                inputs: Sequence[mx.array],
                template: Mapping[str, Constant],
                groups: tuple[int, int, int],
                threads: int,
                outputs: Sequence[Shaped],
            ) -> list[Any]:
                call = call_of(source, inputs, template, threads, outputs)
                self.calls[re.sub(r"\s+", " ", call.text)] = call
                return [mx.zeros(shape, kind) for shape, kind in outputs]

            return kernel

        return make

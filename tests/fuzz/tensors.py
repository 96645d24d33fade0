"""Safetensors files by hand: what a library would never write, too."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.values import TEXTS, hostile, key

SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "U32": 4,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
}


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Tensor]


def tensor(array: np.ndarray[Any, Any], dtype: str = "F32") -> Tensor:
    """`array` in one of the three types that adapters have."""
    if dtype == "BF16":
        upper = np.ascontiguousarray(array, "<f4").view("<u4") >> 16
        return Tensor(dtype, array.shape, upper.astype("<u2").tobytes())
    return Tensor(dtype, array.shape, array.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes())


def header_of(tensors: Tensors) -> dict[str, Any]:
    header: dict[str, Any] = {}
    at = 0
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + len(t.data)]}
        at += len(t.data)
    return header


def written(tensors: Tensors, header: dict[str, Any] | bytes | None = None, length: int | None = None) -> bytes:
    """A file with these tensors, and this header and the length of one in place of what they should be."""
    header = header_of(tensors) if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return (size % 2**64).to_bytes(8, "little") + text + b"".join(t.data for t in tensors.values())


def changed(rng: Random, tensors: Tensors) -> tuple[Tensors, tuple[str, ...]]:
    """The tensors with one that is whole and is not what it was; its names, and what it has in common with its
    partner's."""
    tensors = dict(tensors)
    old = name = rng.choice(list(tensors))
    dtype, shape, data = tensors[name]
    match rng.randrange(8):
        case 0:
            del tensors[name]
        case 1:
            new = rng.choice(
                (*TEXTS[6:], name.upper(), name + ".x", "x." + name, name.replace("1", "9999999999"), key(rng))
            )
            new = new.encode("utf-8", "replace").decode()  # a header is UTF-8
            tensors[new] = tensors.pop(name)
            name = new
        case 2:
            dtype = rng.choice(list(SIZES))
            tensors[name] = Tensor(dtype, shape, b"\0" * (math.prod(shape) * SIZES[dtype]))
        case 3:
            shape = shape[::-1]
            tensors[name] = Tensor(dtype, shape, data)
        case 4:
            some = list(shape)
            some = some or [1]
            some[rng.randrange(len(some))] += rng.choice((-1, 1, 3))
            tensors[name] = Tensor(dtype, tuple(some), b"\0" * (math.prod(some) * SIZES[dtype]))
        case 5:
            shape = rng.choice(((), (0,), (0, 0), (1, *shape), (*shape, 1), (math.prod(shape),)))
            tensors[name] = Tensor(dtype, shape, data if math.prod(shape) * SIZES[dtype] == len(data) else b"")
            if math.prod(shape) and not tensors[name].data:
                tensors[name] = Tensor(dtype, shape, b"\0" * (math.prod(shape) * SIZES[dtype]))
        case 6:
            some_data = bytearray(data)
            at = rng.randrange(max(len(data) // 4, 1)) * 4
            some_data[at : at + 4] = rng.choice(
                (b"\xff" * 4, b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\xff\xff\x7f\x7f")
            )
            tensors[name] = Tensor(dtype, shape, bytes(some_data[: len(data)]))
        case _:
            tensors[name + ".copy"] = tensors[name]
            name += ".copy"
    return tensors, (name, old.removesuffix(".weight").rpartition(".")[0])


def spoiled(rng: Random, tensors: Tensors) -> bytes:
    """A file whose header says what is not so, or is none."""
    header = header_of(tensors)
    name = rng.choice(list(header))
    entry = header[name]
    match rng.randrange(13):
        case 0:
            at = rng.choice((0, 1, -1, 4, 2**32, 2**63))
            entry["data_offsets"][rng.randrange(2)] += at
        case 1:
            entry["data_offsets"] = rng.choice(
                ([], [0], [0, 0], [8, 0], [-8, 0], [0, 2**64], ["0", "8"], None, [0.5, 8])
            )
        case 2:
            entry["data_offsets"] = list(rng.choice(list(header.values()))["data_offsets"])
        case 3:
            entry["shape"] = rng.choice(
                ([2**32, 2**32], [2**63], [-1, 4], [2**64 - 1, 2], [1] * 5000, ["4"], 4, None, [1.5])
            )
        case 4:
            entry["dtype"] = rng.choice(("F31", "", None, 4, "f32", "\ud800", ["F32"]))
        case 5:
            del entry[rng.choice(list(entry))]
        case 6:
            header["__metadata__"] = hostile(rng)
        case 7:
            header[name] = hostile(rng)
        case 8:
            length = rng.choice((0, 1, 7, 8, 2**31, 2**62, 2**63, 2**64 - 1))
            return written(tensors, length=length)
        case 9:
            raw = json.dumps(header).encode()
            return written(tensors, length=len(raw) + rng.choice((-1, 1, 8, -8)))
        case 10:
            raw = json.dumps(header).encode()
            return written(tensors, raw[:-1] + b"," + raw[1:])  # every name twice
        case 11:
            return written(tensors, rng.choice((b"[" * 100_000, b"{}", b"[]", b"null", b"", b"\xff" * 20, b"{" * 5000)))
        case _:
            header = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(500)} | header
    return written(tensors, header)

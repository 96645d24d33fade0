"""Tinker's binary messages, read and written by the rules of protocol buffers.

These are read field by field with a budget: a library makes an object of each message in a body, and a body of empty
messages, two bytes each, would take a hundred times its size. Field numbers are those of the protocol:

    ForwardBackwardRequest  1 model_id, 2 seq_id, 3 data*, 4 loss_fn, 5 loss_fn_config<text, double>, 6 forward_only,
                            7 loss_fn_config_v2<text, 1 number or 2 text>
    Datum                   1 model_input* (a chunk: 1 encoded_text (1 tokens int32), 2 image, 3 dmel),
                            2 loss_fn_inputs<text, Tensor>, 3 and 4 provenance spans
    Tensor                  1 dense or 2 sparse_csr (1 values, 2 crow_indices int64, 3 col_indices int64), 3 dtype,
                            4 shape
    ForwardBackwardOutput   1 loss_fn_output_type, 2 loss_fn_outputs*, 3 metrics<text, double>
    ArrayRecord             1 type_tag, 2 fields<text, BatchedTensor>, 3 num_datums
    BatchedTensor           1 data, 2 offsets int64, 3 dtype, 4 trailing_shape
    SampleResponse          1 sequences*, 2 prompt_logprobs float32, 3 topk_prompt_logprobs, 4 prompt_cache_hit_tokens
    SampledSequence         1 stop_reason, 2 tokens int32, 3 logprobs float32, 4 topk_sampled_logprobs
    TopkLogprobs            1 token_ids int32, 2 logprobs float32, 3 k, 4 length

Arrays are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest

Array = npt.NDArray[Any]
Value = int | memoryview
"""The value of a field: a number, or the bytes of a text, an array or a message."""

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Types of a tensor's numbers."""

_SIZES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_AXES = 8
STOP, LENGTH = 0, 1
"""Reasons why a sequence has ended."""


@dataclass
class Datum:
    """One example: the tokens that the model reads, and the tensors of the loss by name."""

    tokens: Array
    inputs: dict[str, Array]


@dataclass
class PassRequest:
    """A request for a pass, checked as far as its form goes."""

    model_id: str = ""
    seq_id: int = 0
    loss: str = ""
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    data: list[Datum] = field(default_factory=list)


class Budget:
    """A count of what may still be read of one body."""

    def __init__(self) -> None:
        """Begin with the limits of limits.py."""
        self.fields = limits.MAX_TINKER_FIELDS
        self.numbers = limits.MAX_TINKER_NUMBERS

    def field(self) -> None:
        """Count a field. Raises InvalidRequest for one too many."""
        self.fields -= 1
        if self.fields < 0:
            raise InvalidRequest(f"the body has over {limits.MAX_TINKER_FIELDS} fields", param="data")

    def array(self, count: int, param: str) -> None:
        """Count the numbers of an array. Raises InvalidRequest naming `param` for too many."""
        if count > self.numbers:
            raise InvalidRequest(
                f"{param}: the tensors of the body have over {limits.MAX_TINKER_NUMBERS} numbers", param=param
            )
        self.numbers -= count


# -- reading ------------------------------------------------------------------------------------------------------


def _damaged(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is damaged: it is not a message of Tinker's API", param=where)


def _varint(data: memoryview, at: int, where: str) -> tuple[int, int]:
    """Return the number at `at`, and where the next byte after it is."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise _damaged(where)
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7


def _fields(data: memoryview, budget: Budget, where: str) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field of a message. Raises InvalidRequest naming `where`."""
    at = 0
    while at < len(data):
        budget.field()
        tag, at = _varint(data, at, where)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at, where)
            yield tag >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _varint(data, at, where)
        if size is None or size > len(data) - at:
            raise _damaged(where)
        yield tag >> 3, data[at : at + size]
        at += size


def _bytes(value: Value, where: str) -> memoryview:
    if isinstance(value, int):
        raise _damaged(where)
    return value


def _text(value: Value, where: str) -> str:
    data = _bytes(value, where)
    try:
        if len(data) > 256:
            raise InvalidRequest(f"{where} has over 256 bytes", param=where)
        return bytes(data).decode()
    except UnicodeDecodeError as e:
        raise _damaged(where) from e


def _number(value: Value, where: str) -> int:
    """Return a whole number, with its sign."""
    if not isinstance(value, int):
        raise _damaged(where)
    return value - (1 << 64) if value >= 1 << 63 else value


def _double(value: Value, where: str) -> float:
    data = _bytes(value, where)
    if len(data) != 8:
        raise _damaged(where)
    found: float = struct.unpack("<d", data)[0]
    return found


def read_pass(body: bytes) -> PassRequest:
    """Return a ForwardBackwardRequest. Raises InvalidRequest naming the field that is wrong."""
    budget, found = Budget(), PassRequest()
    old: dict[str, float | str] = {}
    for number, value in _fields(memoryview(body), budget, "the body"):
        match number:
            case 1:
                found.model_id = _text(value, "model_id")
            case 2:
                found.seq_id = _number(value, "seq_id")
            case 3:
                if len(found.data) >= limits.MAX_TINKER_DATA:
                    raise InvalidRequest(f"data has over {limits.MAX_TINKER_DATA} examples", param="data")
                where = f"data[{len(found.data)}]"
                found.data.append(_datum(_bytes(value, where), budget, where))
            case 4:
                found.loss = _text(value, "loss_fn")
            case 5:
                key, inner = _entry(value, budget, "loss_fn_config")
                old[key] = 0.0 if inner is None else _double(inner, "loss_fn_config")
            case 6:
                found.forward_only = bool(_number(value, "forward_only"))
            case 7:
                key, inner = _entry(value, budget, "loss_fn_config")
                found.config[key] = _setting(inner, budget)
    found.config = found.config or old
    return found


def _entry(value: Value, budget: Budget, where: str) -> tuple[str, Value | None]:
    """Return the key and the value of an entry of a mapping; None: it has none."""
    key, inner = "", None
    for number, own in _fields(_bytes(value, where), budget, where):
        if number == 1:
            key = _text(own, where)
        elif number == 2:
            inner = own
    return key, inner


def _setting(value: Value | None, budget: Budget) -> float | str:
    """Return a LossConfigValue."""
    found: float | str = 0.0
    for number, own in _fields(_bytes(value, "loss_fn_config"), budget, "loss_fn_config") if value is not None else ():
        if number == 1:
            found = _double(own, "loss_fn_config")
        elif number == 2:
            found = _text(own, "loss_fn_config")
    return found


def _datum(data: memoryview, budget: Budget, where: str) -> Datum:
    """Return one example."""
    chunks: list[Array] = []
    inputs: dict[str, Array] = {}
    for number, value in _fields(data, budget, where):
        if number == 1:
            chunks.append(_chunk(_bytes(value, where), budget, f"{where}.model_input"))
        elif number == 2:
            key, inner = _entry(value, budget, f"{where}.loss_fn_inputs")
            place = f"{where}.loss_fn_inputs[{ascii(key[:32])[1:-1]}]"
            inputs[key] = _tensor(memoryview(b"") if inner is None else _bytes(inner, place), budget, place)
    return Datum(np.concatenate(chunks) if chunks else np.zeros(0, np.int32), inputs)


def _chunk(data: memoryview, budget: Budget, where: str) -> Array:
    """Return the tokens of a chunk. Raises InvalidRequest for an image or a sound."""
    tokens = np.zeros(0, "<i4")
    for number, value in _fields(data, budget, where):
        if number in (2, 3):
            raise InvalidRequest(
                f"{where} holds {'an image' if number == 2 else 'a sound'}; tokens are trained on", param=where
            )
        if number == 1:
            for inner, own in _fields(_bytes(value, where), budget, where):
                if inner == 1:
                    tokens = _array(_bytes(own, where), INT32, budget, where)
    return tokens


def _array(data: memoryview, kind: int, budget: Budget, where: str) -> Array:
    """Return the numbers of an array that lies in `data`."""
    dtype = np.dtype(_SIZES[kind])
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{where} has {len(data)} bytes, which are no whole numbers", param=where)
    budget.array(len(data) // dtype.itemsize, where)
    found = np.frombuffer(data, dtype)
    return (found.astype(np.uint32) << 16).view(np.float32) if kind == BFLOAT16 else found


def _tensor(data: memoryview, budget: Budget, where: str) -> Array:
    """Return a tensor, a sparse one written out."""
    dense: memoryview | None = None
    sparse: memoryview | None = None
    kind, shape = 0, []
    for number, value in _fields(data, budget, where):
        match number:
            case 1:
                dense = _bytes(value, where)
            case 2:
                sparse = _bytes(value, where)
            case 3:
                kind = _number(value, where)
            case 4:
                shape += [_number(value, where)] if isinstance(value, int) else _packed(value, where)
    if kind not in _SIZES:
        raise InvalidRequest(f"{where} has no dtype that is known", param=where)
    if len(shape) > _MOST_AXES or any(not 0 <= n <= limits.MAX_TINKER_NUMBERS for n in shape):
        raise InvalidRequest(f"{where} has a shape that cannot be", param=where)
    if sparse is not None:
        return _sparse(sparse, kind, shape, budget, where)
    found = _array(dense if dense is not None else memoryview(b""), kind, budget, where)
    if shape and _product(shape) != found.size:
        raise InvalidRequest(f"{where} has {found.size} numbers and the shape {shape}", param=where)
    return found.reshape(shape) if shape else found


def _packed(data: memoryview, where: str) -> list[int]:
    """Return numbers that lie end to end."""
    if len(data) > 10 * _MOST_AXES:
        raise InvalidRequest(f"{where} has a shape that cannot be", param=where)
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at, where)
        found.append(_number(value, where))
    return found


def _product(shape: Sequence[int]) -> int:
    """Return the size of a shape, in whole numbers of any size."""
    size = 1
    for n in shape:
        size *= n
    return size


def _sparse(data: memoryview, kind: int, shape: list[int], budget: Budget, where: str) -> Array:
    """Return a matrix in compressed rows, written out with zeros."""
    parts: dict[int, memoryview] = {}
    for number, value in _fields(data, budget, where):
        parts[number] = _bytes(value, where)
    values, rows, columns = (
        _array(parts.get(number, memoryview(b"")), own, budget, where)
        for number, own in ((1, kind), (2, INT64), (3, INT64))
    )
    if len(shape) != 2:
        raise InvalidRequest(f"{where} is sparse and needs a shape of two numbers", param=where)
    budget.array(_product(shape), where)
    height, width = shape
    if (
        rows.size != height + 1
        or values.size != columns.size
        or rows[0] != 0
        or rows[-1] != values.size
        or (np.diff(rows) < 0).any()
        or (columns < 0).any()
        or (columns >= width).any()
    ):
        raise InvalidRequest(f"{where} has indices that do not fit its shape {shape}", param=where)
    found = np.zeros((height, width), values.dtype)
    found[np.repeat(np.arange(height), np.diff(rows)), columns] = values
    return found


# -- writing ------------------------------------------------------------------------------------------------------


def _write_varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _put(number: int, value: int | float | str | bytes) -> bytes:
    """Return a field: a whole number, a double, a text, or bytes."""
    if isinstance(value, int):
        return _write_varint(number << 3 | _VARINT) + _write_varint(value)
    if isinstance(value, float):
        return _write_varint(number << 3 | _FIXED64) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return _write_varint(number << 3 | _BYTES) + _write_varint(len(data)) + data


def _put_entry(number: int, key: str, value: bytes | float) -> bytes:
    """Return an entry of a mapping."""
    return _put(number, _put(1, key) + _put(2, value))


def write_pass(arrays: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput with `arrays` as the logprobs of its data.

    Neighbours whose arrays have the same axes but the first make one record each.
    """
    out = [_put(1, "ArrayRecord")]
    groups: list[list[Array]] = []
    for array in arrays:
        if not groups or groups[-1][0].shape[1:] != array.shape[1:]:
            groups.append([])
        groups[-1].append(array)
    for group in groups:
        offsets = np.cumsum([0, *(array.size * 4 for array in group)]).astype("<i8")
        data = b"".join(array.astype("<f4").tobytes() for array in group)
        trailing = b"".join(map(_write_varint, group[0].shape[1:]))
        tensor = _put(1, data) + _put(2, offsets.tobytes()) + _put(3, FLOAT32) + _put(4, trailing)
        out.append(_put(2, _put(1, "ArrayRecord") + _put_entry(2, "logprobs", tensor) + _put(3, len(group))))
    out += [_put_entry(3, name, float(value)) for name, value in metrics.items()]
    return b"".join(out)


@dataclass(frozen=True)
class Topk:
    """The most likely tokens of each position: ids and logprobs, both [positions, k]."""

    ids: Array
    logprobs: Array


@dataclass(frozen=True)
class Sampled:
    """One sequence that was sampled: its tokens, their logprobs, and the most likely tokens if they were asked for."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: int
    topk: Topk | None = None


def write_samples(sequences: Sequence[Sampled], prompt: Array | None, topk: Topk | None, cached: int) -> bytes:
    """Return a SampleResponse. `prompt` has the logprobs of the prompt's tokens, NaN for those that have none."""
    out = [_put(1, _sequence(own)) for own in sequences]
    if prompt is not None:
        out.append(_put(2, prompt.astype("<f4").tobytes()))
    if topk is not None:
        out.append(_put(3, _topk(topk)))
    out.append(_put(4, cached))
    return b"".join(out)


def _sequence(own: Sampled) -> bytes:
    tokens, logprobs = np.array(own.tokens, "<i4").tobytes(), np.array(own.logprobs, "<f4").tobytes()
    body = _put(1, own.stop_reason) + _put(2, tokens) + _put(3, logprobs)
    return body if own.topk is None else body + _put(4, _topk(own.topk))


def _topk(topk: Topk) -> bytes:
    ids, logprobs = topk.ids.astype("<i4").tobytes(), topk.logprobs.astype("<f4").tobytes()
    length, k = topk.ids.shape
    return _put(1, ids) + _put(2, logprobs) + _put(3, k) + _put(4, length)

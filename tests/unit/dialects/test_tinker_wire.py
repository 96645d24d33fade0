"""Tinker's binary messages: read as its SDK writes them, written as it reads them, and damaged in every way."""

from __future__ import annotations

import contextlib
import random
import struct
from typing import Any

import numpy as np
import pytest
import zstandard

from mlx_tandem import limits
from mlx_tandem.dialects.tinker import wire
from mlx_tandem.dialects.tinker.unpacking import unpacked
from mlx_tandem.errors import InvalidRequest, TooLarge, UnsupportedMedia
from tests.tinker_server import datum, field, tensor
from tests.tinker_server import pass_body as body

EXAMPLE = datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.5])


def test_a_pass_is_read() -> None:
    found = wire.read_pass(body(EXAMPLE, EXAMPLE, forward_only=True, config={"beta": 0.25}))
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("m", 7, "cross_entropy", True)
    assert found.config == {"beta": 0.25}
    assert [own.tokens.tolist() for own in found.data] == [[1, 2, 3]] * 2
    assert found.data[1].inputs["target_tokens"].tolist() == [2, 3, 4]
    assert found.data[1].inputs["weights"].tolist() == [0.0, 1.0, 0.5]
    newer = field(7, wire._put(1, "beta") + field(2, wire._put(1, 0.5)))
    assert wire.read_pass(body(config={"beta": 0.25}) + newer).config == {"beta": 0.5}


def test_a_sparse_tensor_is_written_out() -> None:
    parts = [np.array([5, 6, 7], "<i8"), np.array([0, 2, 2, 3], "<i8"), np.array([0, 3, 1], "<i8")]
    sparse = b"".join(field(i + 1, part.tobytes()) for i, part in enumerate(parts))
    made = field(2, sparse) + field(3, wire.INT64) + field(4, bytes([3, 4]))
    found = wire.read_pass(body(datum([1, 2, 3], target_tokens=made))).data[0].inputs["target_tokens"]
    assert found.tolist() == [[5, 0, 0, 6], [0, 0, 0, 0], [0, 7, 0, 0]]


def test_half_precision_is_read() -> None:
    values = np.array([1.5, -2.0], np.float32)
    half = (values.view(np.uint32) >> 16).astype("<u2")
    found = wire.read_pass(body(datum([1, 2], weights=tensor(half, wire.BFLOAT16)))).data[0].inputs["weights"]
    assert found.tolist() == [1.5, -2.0] and found.dtype == np.float32


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (b"\xff", "the body is damaged"),
        (b"\x1a\x7f\x00", "the body is damaged"),
        (b"\x0b", "the body is damaged"),  # a group
        (field(1, b"\xff"), "model_id is damaged"),
        (field(1, b"m" * 300), "model_id has over 256 bytes"),
        (field(2, b"xx"), "seq_id is damaged"),
        (body(field(1, field(2, b""))), r"data\[0\].model_input holds an image"),
        (body(field(1, field(3, b""))), r"data\[0\].model_input holds a sound"),
        (body(datum([1], w=tensor(np.zeros(3, "<f4"), shape=[2]))), r"loss_fn_inputs\[w\] has 3 numbers and the shape"),
        (body(datum([1], w=tensor(np.zeros(3, "<f4"), shape=[1 << 40]))), "has a shape that cannot be"),
        (body(datum([1], w=tensor(np.zeros(3, "<f4"), shape=[1] * 9))), "has a shape that cannot be"),
        (body(datum([1], w=field(4, b"\x01" * 1000))), "has a shape that cannot be"),
        (body(datum([1], w=tensor(np.zeros(3, "<f4"), 9))), "has no dtype that is known"),
        (body(datum([1], w=field(1, b"123") + field(3, 1))), "has 3 bytes, which are no whole numbers"),
        (body(datum([1], w=field(2, b"") + field(3, 2) + field(4, bytes([3, 4])))), "indices that do not fit"),
        (
            body(datum([1], w=field(2, b"") + field(3, 2) + field(4, wire._write_varint(1 << 22) + bytes([8])))),
            f"have over {limits.MAX_TINKER_NUMBERS} numbers",
        ),
        (field(5, field(1, b"beta") + field(2, b"xx")), "loss_fn_config is damaged"),
    ],
)
def test_what_is_wrong_is_named(made: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        wire.read_pass(made)


def test_many_small_fields_cost_nothing() -> None:
    """A library makes an object of each, which takes a hundred times as much memory."""
    empties = {
        "data": field(3, b"") * 1_000_000,
        "chunks": field(3, field(1, b"") * 1_000_000),
        "spans": field(3, field(3, b"") * 1_000_000),
        "numbers": field(2, 1) * 1_000_000,
    }
    for made in empties.values():
        with pytest.raises(InvalidRequest, match="over"):
            wire.read_pass(made)


def test_sparse_tensors_together_have_a_limit() -> None:
    rows = np.zeros(1 << 16, "<i8").tobytes()
    sparse = field(2, field(2, rows)) + field(3, wire.INT64)
    shape = field(4, wire._write_varint((1 << 16) - 1) + wire._write_varint(128))
    with pytest.raises(InvalidRequest, match="have over"):
        wire.read_pass(body(*[datum([1], t=sparse + shape)] * 3))


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_read(seed: int) -> None:
    rng, whole = random.Random(seed), body(EXAMPLE, EXAMPLE)
    for _ in range(3000):
        made = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(made))
            match rng.randrange(3):
                case 0:
                    made[at] = rng.randrange(256)
                case 1:
                    del made[at : at + rng.randint(1, 9)]
                case 2:
                    made[at:at] = rng.randbytes(rng.randint(1, 5))
            if not made:
                break
        with contextlib.suppress(InvalidRequest):
            wire.read_pass(bytes(made))


# -- compression --------------------------------------------------------------------------------------------------


def test_what_is_compressed_is_unpacked() -> None:
    data = body(EXAMPLE) * 100
    assert unpacked(zstandard.ZstdCompressor().compress(data), "zstd", len(data)) == data
    assert unpacked(data, "identity", 1) == data


def test_what_grows_a_hundredfold_is_refused_before_it_is_unpacked() -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(limits.MAX_TINKER_UNPACKED + 1))
    assert len(packed) * 100 < limits.MAX_TINKER_UNPACKED
    with pytest.raises(TooLarge, match="unpacked"):
        unpacked(packed, "zstd", limits.MAX_TINKER_UNPACKED)
    lies = bytearray(packed)
    lies[6:10] = struct.pack("<I", 1000)  # the size that the header announces
    with pytest.raises((TooLarge, InvalidRequest)):
        unpacked(bytes(lies), "zstd", limits.MAX_TINKER_UNPACKED)


@pytest.mark.parametrize("cut", [0, 3, 9, -1])
def test_damaged_compression_is_refused(cut: int) -> None:
    packed = zstandard.ZstdCompressor().compress(body(EXAMPLE))
    with pytest.raises(InvalidRequest):
        unpacked(packed[:cut], "zstd", 1000)
    with pytest.raises(InvalidRequest):
        unpacked(packed + b"x", "zstd", 1000)


def test_other_encodings_and_sizes_that_are_not_announced_are_refused() -> None:
    with pytest.raises(UnsupportedMedia, match="zstd"):
        unpacked(b"", "gzip", 1000)
    stream = zstandard.ZstdCompressor().compressobj()
    with pytest.raises(InvalidRequest, match="say in its header"):
        unpacked(stream.compress(b"abc") + stream.flush(), "zstd", 1000)


# -- the SDK's own conversions ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdk() -> Any:
    return pytest.importorskip("tinker.proto.response_conv")


def test_the_sdk_reads_a_pass(sdk: Any) -> None:
    arrays = [np.arange(3, dtype=np.float32), np.ones(2, np.float32), np.arange(8, dtype=np.float32).reshape(4, 2)]
    found = sdk.deserialize_forward_backward_output(wire.write_pass(arrays, {"loss:sum": -1.5, "tokens:sum": 3.0}))
    assert found.metrics == {"loss:sum": -1.5, "tokens:sum": 3.0}
    assert [own["logprobs"].shape for own in found.loss_fn_outputs] == [[3], [2], [4, 2]]
    for own, array in zip(found.loss_fn_outputs, arrays, strict=True):
        assert np.array_equal(own["logprobs"].to_numpy().reshape(array.shape), array)


def test_the_sdk_reads_samples(sdk: Any) -> None:
    topk = wire.Topk(np.array([[0, 0], [7, 8]]), np.array([[-99999.0, -99999.0], [-0.5, -1.0]]))
    sequences = [wire.Sampled([5, 6], [-0.25, -0.5], wire.STOP, topk), wire.Sampled([9], [-1.0], wire.LENGTH)]
    prompt = np.array([np.nan, -2.0], np.float32)
    found = sdk.deserialize_sample_response(wire.write_samples(sequences, prompt, topk, 3))
    assert [(own.stop_reason, own.tokens, own.logprobs) for own in found.sequences] == [
        ("stop", [5, 6], [-0.25, -0.5]),
        ("length", [9], [-1.0]),
    ]
    assert found.prompt_logprobs == [None, -2.0] and found.prompt_cache_hit_tokens == 3
    assert found.topk_prompt_logprobs == [None, [(7, -0.5), (8, -1.0)]]
    assert found.sequences[0].topk_logprobs == [None, [(7, -0.5), (8, -1.0)]]
    empty = sdk.deserialize_sample_response(wire.write_samples([wire.Sampled([], [], wire.STOP)], None, None, 0))
    assert empty.sequences[0].tokens == [] and empty.prompt_logprobs is None


def test_what_the_sdk_writes_is_read(sdk: Any) -> None:
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    sparse = types.TensorData(
        data=[5, 6], dtype="int64", shape=[2, 4], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[3, 0]
    )
    inputs: list[Any] = [
        {"target_tokens": np.array([2, 3]), "weights": np.array([0.5, 1.0], np.float32)},
        {"target_tokens": sparse},
    ]
    data = [types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=own) for own in inputs]
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5, "kind": "x"}
        ),
        model_id="a:train:0",
        seq_id=3,
    )
    found = wire.read_pass(forward_backward_request_to_proto(asked).SerializeToString())
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("a:train:0", 3, "ppo", False)
    assert found.config == {"clip_low_threshold": 0.5, "kind": "x"}
    assert found.data[0].tokens.tolist() == [1, 2] and found.data[0].inputs["weights"].tolist() == [0.5, 1.0]
    assert found.data[1].inputs["target_tokens"].tolist() == [[0, 0, 0, 5], [6, 0, 0, 0]]

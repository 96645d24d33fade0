"""Frames between front and engine: whole whatever the pieces, and nothing oversize or foreign is read."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect, structs

from mlx_tandem.engine import messages as m
from mlx_tandem.engine import wire
from mlx_tandem.engine.texts import MOST_TEXT, escape_of
from mlx_tandem.engine.wire import EngineChannel, FrameReader, WireError, decode_inbound, decode_outbound, encode
from mlx_tandem.printable import printable
from mlx_tandem.types import (
    AdapterInfo,
    AdapterRef,
    AdapterSource,
    Delta,
    EngineStats,
    Request,
    SamplingParams,
    TokenLogprob,
)
from tests.texts import ANY_TEXT, is_safe

REQUEST = Request(
    7,
    (1, 2, 3),
    SamplingParams(max_tokens=4, seed=-(2**63), logit_bias=((5, -100.0),), stop_token_ids=(9,), logprobs=3),
    AdapterRef("math", 3, "abc"),
    n=2,
)
INBOUND: list[m.Inbound] = [
    m.Submit(REQUEST),
    m.Cancel(7),
    m.Cancel(7, 1),
    m.LoadAdapter(1, AdapterSource("/a/b", "/a"), pin=True),
    m.UnloadAdapter(2, "d"),
    m.Report(3),
    m.Drain(),
]
OUTBOUND: list[m.Outbound] = [
    m.Progress("reading weights", 0.5),
    m.Note(30, "a kernel failed its check", ("Traceback", "ValueError: no")),
    m.Output([Delta(7, 1, (5, 6), (TokenLogprob(-0.5, -0.25, ((5, -0.5),)),) * 2, "stop"), Delta(8, 0, (1,))]),
    m.Failed(7, "step_failed", "the step failed"),
    m.Fatal("engine_error", "gone"),
    m.AdapterLoaded(1, AdapterInfo("d", 8, 2.0, "peft", ("q_proj",), 100, 200)),
    m.CallDone(2),
    m.CallFailed(3, "invalid_adapter", "no", "path"),
    m.Heartbeat(EngineStats(steps=3, resident_adapters=("d",))),
]


def test_messages_come_back_as_they_went() -> None:
    assert decode_inbound(encode(INBOUND)[4:]) == INBOUND
    assert decode_outbound(encode(OUTBOUND)[4:]) == OUTBOUND


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any values of a type that messages use, with any text."""
    match kind:
        case inspect.StrType():
            return ANY_TEXT
        case inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.BytesType():
            return st.binary(max_size=8)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of(map(values, kind.types))
        case inspect.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case inspect.StructType():
            return st.builds(kind.cls, **{f.name: values(f.type) for f in kind.fields})
    raise NotImplementedError(kind)


def texts(value: Any) -> Iterator[str]:
    """Every text in a decoded message."""
    match value:
        case str():
            yield value
        case dict():
            yield from texts(list(value.items()))
        case list() | tuple():
            for item in value:
                yield from texts(item)


MESSAGES = [*get_args(m.Inbound), *get_args(m.Outbound)]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_any_text_can_be_sent_and_shown(kind: type) -> None:
    """A text that came from a file cannot end the engine, and is one printable line of bounded length where it
    arrives. Every other value arrives as it was."""

    @settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(values(inspect.type_info(kind)))
    def check(message: Any) -> None:
        decode = decode_inbound if kind in get_args(m.Inbound) else decode_outbound
        (arrived,) = decode(encode([message])[4:])
        sent, got = (list(texts(msgspec.to_builtins(each))) for each in (message, arrived))
        assert all(is_safe(text) and len(text) <= MOST_TEXT for text in got)
        assert got == [printable(text, MOST_TEXT) for text in sent]
        if all(is_safe(text) and len(text) <= MOST_TEXT for text in sent):
            assert arrived == message

    check()


def test_what_holds_no_text_is_not_looked_at() -> None:
    assert escape_of(m.Output) is None
    delta = m.Output([Delta(1, 0, (1, 2))])
    assert decode_outbound(encode([delta])[4:]) == [delta]
    prompt = Untouchable((1, 2, 3))
    assert decode_inbound(encode([m.Submit(structs.replace(REQUEST, prompt=prompt))])[4:]) == [m.Submit(REQUEST)]


class Untouchable(tuple[int, ...]):
    """Tokens, of which there may be many: nobody looks at each of them in Python."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_frames_are_whole_however_they_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    """Any splitting of the byte stream gives the same frames, each as soon as its last byte is there."""
    stream = b"".join(struct.pack("<I", len(b)) + b for b in bodies)
    ends = [0]
    for b in bodies:
        ends.append(ends[-1] + 4 + len(b))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, frames, at = FrameReader(), [], 0
    for cut in [*cuts, len(stream)]:
        frames += reader.feed(stream[at:cut])
        at = cut
        assert len(frames) == sum(1 for end in ends[1:] if end <= cut)
    assert frames == bodies


def test_frames_are_whole_byte_by_byte() -> None:
    stream = encode(INBOUND) + encode([m.Drain()]) + encode([])
    reader = FrameReader()
    frames = [f for i in range(len(stream)) for f in reader.feed(stream[i : i + 1])]
    assert [decode_inbound(f) for f in frames] == [INBOUND, [m.Drain()], []]


def test_an_oversize_frame_is_refused_by_its_length_alone() -> None:
    """Before its body is waited for or memory is set aside for it."""
    reader = FrameReader()
    good = encode([m.Drain()])
    with pytest.raises(WireError):
        reader.feed(good + struct.pack("<I", m.MAX_FRAME + 1))
    assert FrameReader().feed(struct.pack("<I", m.MAX_FRAME)) == []


def test_an_oversize_frame_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 64)
    with pytest.raises(WireError):
        encode([m.LoadAdapter(1, AdapterSource("x" * 100))])
    assert encode([m.LoadAdapter(1, AdapterSource("x"))])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # never used in msgpack
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([["no such tag", 1]]),
        msgspec.msgpack.encode([["cancel", "not a number"]]),
        msgspec.msgpack.encode([["submit", [1, [2.5], [3]]]]),
        encode(INBOUND)[4:-1],
    ],
)
def test_a_foreign_body_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_inbound(body)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, EngineChannel]]:
    front, engine = socket.socketpair()
    channel = EngineChannel(engine)
    yield front, channel
    channel.close()
    front.close()


def test_a_channel_reads_all_that_has_arrived(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    assert channel.receive(0.0) == []
    front.sendall(encode(INBOUND) + encode([m.Drain()]))
    assert channel.receive(10.0) == [*INBOUND, m.Drain()]
    assert channel.receive(0.0) == []


def test_a_channel_puts_pieces_together_across_reads(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    frame = encode(INBOUND)
    front.sendall(frame[:7])
    assert channel.receive(0.0) == []
    front.sendall(frame[7:])
    assert channel.receive(10.0) == INBOUND


def test_a_channel_says_when_the_front_is_gone(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    front.sendall(encode([m.Drain()]))
    front.close()
    with pytest.raises(WireError):
        channel.receive(0.0)
        channel.receive(0.0)
    with pytest.raises(WireError):
        channel.send([m.CallDone(1)])
        channel.send([m.CallDone(1)])


def test_a_channel_sends_frames_larger_than_the_socket_s_buffer(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    message = m.Output([Delta(1, 0, tuple(range(200_000)))])
    sender = threading.Thread(target=channel.send, args=([message],))
    sender.start()
    reader = FrameReader()
    frames: list[bytes] = []
    while not frames:
        frames = reader.feed(front.recv(1 << 16))
    sender.join()
    assert decode_outbound(frames[0]) == [message]


def test_a_wait_ends_when_it_is_woken() -> None:
    """However often, before or meanwhile; and nothing happens once it is closed."""
    front, engine = socket.socketpair()
    channel = EngineChannel(engine)
    for _ in range(100_000):
        channel.wake()
    assert channel.receive(3600) == []
    front.sendall(encode([m.Drain()]))
    while not (received := channel.receive(3600)):
        channel.wake()
    assert received == [m.Drain()]
    waker = threading.Timer(0.01, channel.wake)
    waker.start()
    assert channel.receive(3600) == []
    waker.join()
    channel.close()
    channel.wake()
    front.close()

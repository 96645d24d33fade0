"""Streams: whoever reads one gets every delta of what still runs, in order, and is told of its end once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.errors import EngineError, TandemError
from mlx_tandem.types import Delta, Request, SamplingParams

FIRST = 7
"""The id of the first request."""

WHICH = st.tuples(st.integers(0, 2), st.integers(0, 2))
"""A request of a stream and a choice of it, as far as it has so many."""

EVENT = st.one_of(
    st.tuples(st.just("delta"), WHICH, st.sampled_from([None, None, "stop"])),
    st.tuples(st.just("delta"), WHICH, st.sampled_from([None, None, "stop"])),
    st.tuples(st.just("pause")),
    st.tuples(st.just("cancel"), WHICH),
    st.tuples(st.just("cancel all")),
    st.tuples(st.just("fail"), st.integers(0, 2)),
    st.tuples(st.just("fail all")),
)


class Owner:
    """The client's end of a stream."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def cancel(self, request: int, choice: int | None = None) -> None:
        self.told.append(("cancel", request - FIRST, choice))

    def forget(self, request: int) -> None:
        self.told.append(("forget", request - FIRST))


async def followed(requests: int, n: int, events: list[Any]) -> None:
    owner = Owner()
    stream = Stream(owner, [Request(FIRST + k, (1,), SamplingParams(9), n=n) for k in range(requests)])
    live = {(k, c) for k in range(requests) for c in range(n)}
    sent: list[Delta] = []
    told: list[Any] = []
    failure: TandemError | None = None
    got: list[Delta] = []

    async def read() -> None:
        async with stream:
            async for deltas in stream:
                assert deltas
                got.extend(deltas)

    def alive(request: int) -> bool:
        return any(k == request for k, _ in live)

    def end(which: tuple[int, int]) -> None:
        live.remove(which)
        if not alive(which[0]):
            told.append(("forget", which[0]))

    reader = asyncio.create_task(read())
    for number, (kind, *what) in enumerate([*events, ("cancel all",)]):
        k, c = what[0] if what and isinstance(what[0], tuple) else (0, 0)
        k, c = k % requests, c % n
        if kind == "pause":
            await asyncio.sleep(0)
        elif kind == "delta":
            delta = Delta(FIRST + k, c, (number,), None, what[1])
            assert stream.index(delta) == k * n + c
            stream.push(delta, float(number + 1))
            if (k, c) in live:
                sent.append(delta)
                if what[1] is not None:
                    end((k, c))
        elif kind == "cancel":
            if (k, c) in live:
                told.append(("cancel", k, c if sum(i == k for i, _ in live) > 1 else None))
                end((k, c))
            stream.cancel(k * n + c)
        elif live:
            gone = what[0] % requests if kind == "fail" else None
            told += [("cancel", i, None) for i in range(requests) if alive(i) and i != gone]
            live.clear()
            if kind == "cancel all":
                stream.cancel()
            else:
                failure = EngineError(f"failure {number}")
                stream.fail(failure, None if gone is None else FIRST + gone)
    try:
        await asyncio.wait_for(reader, 60)
        raised = None
    except EngineError as e:
        raised = e
    assert got == sent
    assert owner.told == told
    assert raised is failure
    times = [float(number + 1) for delta in sent for number in delta.tokens]
    assert (stream.first_token_at, stream.last_token_at) == ((times[0], times[-1]) if times else (0.0, 0.0))
    if failure is None:
        assert not [deltas async for deltas in stream], "it stays ended"


@pytest.mark.promise("PRP-7")
@settings(max_examples=300)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(EVENT, max_size=25))
def test_a_stream_ends_once_with_all_that_came_before(requests: int, n: int, events: list[Any]) -> None:
    """Whether choices end, are cancelled or fail, and whenever the reader reads."""
    asyncio.run(followed(requests, n, events))

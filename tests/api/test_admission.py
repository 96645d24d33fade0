"""Who is let in: places are taken and given back, and those who are refused are told when to come again."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import copy_context

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_tandem.config import ServerConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.messages import Occupancy, Output, Submit
from mlx_tandem.errors import EngineUnavailable, InvalidRequest, Overloaded
from mlx_tandem.generation.prompted import CLIENT
from mlx_tandem.generation.request_admission import RequestAdmission
from mlx_tandem.limits import MAX_OPEN_ARRAYS
from mlx_tandem.types import Delta
from tests.api.scripted import INFO, Peer, scripted_server
from tests.waiting import until

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
SEATS = INFO.max_num_seqs


def admission(clock: Callable[[], float], **server: object) -> tuple[RequestAdmission, EngineClient]:
    """Over a client whose engine is ready and has not been started."""

    def launch() -> None:
        raise AssertionError("nothing is started here")

    client = EngineClient(launch)
    client.state, client.info = "ready", INFO
    return RequestAdmission(ServerConfig(**server), client, clock), client


class Ending(Exception):
    pass


class Places(RuleBasedStateMachine):
    """Any order of arrivals and endings, whichever way a request ends."""

    @initialize(queue=st.integers(1, 6), most=st.integers(0, 6), threshold=st.sampled_from([0.5, 0.9, 1.0]))
    def begin(self, queue: int, most: int, threshold: float) -> None:
        self.now = 100.0
        self.queue, self.most, self.threshold = queue, most, threshold
        self.request_admission, self.client = admission(
            lambda: self.now,
            max_queue_size=queue,
            max_concurrent_requests=most,
            memory_pressure_threshold=threshold,
        )
        self.open: list[tuple[int, ExitStack]] = []

    @rule(choices=st.integers(1, SEATS + 8))
    def arrive(self, choices: int) -> None:
        taken = sum(c for c, _ in self.open)
        load = self.client.occupancy
        full = self.open and load.used_blocks / 64 >= self.threshold
        fits = taken + choices <= SEATS + self.queue and not full and not (0 < self.most <= len(self.open))
        stack = ExitStack()
        if choices > SEATS + self.queue:
            with pytest.raises(InvalidRequest):
                stack.enter_context(self.request_admission.admitted(choices))
        elif fits:
            stack.enter_context(self.request_admission.admitted(choices))
            self.open.append((choices, stack))
        else:
            with pytest.raises(Overloaded) as refused:
                stack.enter_context(self.request_admission.admitted(choices))
            assert refused.value.retry_after is not None and 1 <= refused.value.retry_after <= 120

    @precondition(lambda self: self.open)
    @rule(data=st.data(), error=st.sampled_from([None, Ending, KeyboardInterrupt]))
    def end(self, data: st.DataObject, error: type[BaseException] | None) -> None:
        _, stack = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if error is None:
            stack.close()
        else:
            with pytest.raises(error), stack:
                raise error

    @rule(used=st.one_of(st.integers(0, 64), st.sampled_from([32, 64])))  # among these exactly a threshold
    def hear(self, used: int) -> None:
        self.client.occupancy = Occupancy(1, 0, used, 64 - used)

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def places_are_those_of_the_open(self) -> None:
        if hasattr(self, "open"):
            assert self.request_admission.open_requests == len(self.open)
            assert self.request_admission.open_choices == sum(c for c, _ in self.open)
            assert self.request_admission._idle.is_set() == (not self.open)


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_arrays_of_images_are_counted() -> None:
    gate, _ = admission(lambda: 0.0)
    with gate.admitted(1, 2 * MAX_OPEN_ARRAYS):  # A request alone is always admitted.
        gate.check()
        with pytest.raises(Overloaded, match="images"):
            gate.check(1, 1)
    gate.check(1, 1)
    assert gate.refused["open_images"] == 1
    with gate.admitted(1), gate.admitted(1, MAX_OPEN_ARRAYS + 1):  # The first one has no images.
        pass
    exactly = gate.admitted(1, MAX_OPEN_ARRAYS - 5), gate.admitted(1, 5)
    with exactly[0], exactly[1], pytest.raises(Overloaded, match="images"):
        gate.check(1, 1)
    assert gate.open_arrays == 0


def retry_after(admission: RequestAdmission, choices: int = 1) -> float:
    with pytest.raises(Overloaded) as refused:
        admission.check(choices)
    assert refused.value.retry_after is not None
    return refused.value.retry_after


@pytest.mark.promise("FLT-43")
def test_retry_after_is_when_places_will_be_free():
    """Requests that end every four seconds, then as often in a busy hour as after an idle one. One of them waits."""
    now = 0.0
    gate, _ = admission(lambda: now, max_queue_size=1)
    stacks = []
    for _ in range(SEATS + 1):
        stacks.append(ExitStack())
        stacks[-1].enter_context(gate.admitted(1))
    now = 3.0
    assert retry_after(gate) == pytest.approx(2 * 3)  # none has ended in three seconds
    for i in range(40):
        now += 4.0
        stacks.pop(0).close()
        stacks.append(ExitStack())
        stacks[-1].enter_context(gate.admitted(1))
        if i > 20:
            assert retry_after(gate) == pytest.approx(2 * 4, rel=0.2)
            assert retry_after(gate, 3) == pytest.approx(4 * 4, rel=0.2)
    for stack in stacks:
        stack.close()
    now += 3600.0
    for _ in range(SEATS + 1):
        stacks.append(ExitStack())
        stacks[-1].enter_context(gate.admitted(1))
    assert retry_after(gate) == pytest.approx(2 * 4, rel=0.3)
    now += 100_000.0
    assert retry_after(gate) == 120


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("setting", ["max_queue_size", "max_concurrent_requests"])
def test_who_is_refused_waits_as_long_as_who_waits_in_the_queue(setting: str, choices: int):
    """Those that wait for a seat are counted, whichever limit refuses: earlier, there is a place at the queue's end."""
    now, queue = 0.0, 24
    most = {"max_queue_size": queue} | ({setting: (SEATS + queue) // choices} if "concurrent" in setting else {})
    gate, _ = admission(lambda: now, **most)
    with ExitStack() as stack:
        for _ in range((SEATS + queue) // choices):
            stack.enter_context(gate.admitted(choices))
        now = 0.5
        assert retry_after(gate, choices) == pytest.approx((queue / choices + 1) * 0.5)


def test_a_queue_that_one_client_has_filled_is_not_full_for_another():
    """Each has an equal share of it."""
    gate, _ = admission(lambda: 0.0, max_queue_size=4)
    capacity = SEATS + 4

    def take(client: int, choices: int = 1) -> bool:
        CLIENT.set(client)
        try:
            stack.enter_context(gate.admitted(choices))
        except Overloaded:
            return False
        return True

    def run() -> None:
        assert all(take(1) for _ in range(capacity)) and not take(1)
        assert all(take(2) for _ in range(capacity // 2)) and not take(2)
        assert not take(1) and take(3, capacity // 3) and not take(3)

    with ExitStack() as stack:
        copy_context().run(run)
    assert gate.open_choices == 0 and not gate._of_clients


def test_requests_say_whose_they_are():
    """By address and key, whether the server asks for a key or not; so clients take turns."""
    with scripted_server() as (client, peer, _):
        found = []
        for headers in ({"authorization": "Bearer a"}, {"x-api-key": "b"}, {}, {"authorization": "Bearer a"}):
            asking = threading.Thread(
                target=client.post, args=("/v1/chat/completions",), kwargs={"json": BODY, "headers": headers}
            )
            asking.start()
            request = peer.hear(Submit).request
            peer.say(Output((Delta(request.id, 0, (5,), finish="length"),)))
            asking.join()
            found.append(request.client)
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_memory_that_must_free_is_counted_in_requests():
    now = 0.0
    gate, client = admission(lambda: now)
    with gate.admitted(1), gate.admitted(1):
        now = 10.0
        client.occupancy = Occupancy(2, 0, 95, 5)
        assert retry_after(gate) == pytest.approx(10)
        client.occupancy = Occupancy(2, 0, 89, 11)
        gate.check()
    client.occupancy = Occupancy(2, 0, 95, 5)  # an engine that has not spoken since
    gate.check()


def test_nobody_is_let_in_while_the_engine_is_away():
    gate, client = admission(lambda: 0.0)
    client.state = "restarting"
    with pytest.raises(EngineUnavailable):
        gate.check()


# -- over HTTP ----------------------------------------------------------------------------------------------------


class Asking:
    """A request that is open until the test ends it."""

    def __init__(self, client: httpx.Client, peer: Peer, **fields: object):
        self._replies: list[httpx.Response] = []
        self._thread = threading.Thread(target=self._ask, args=(client, {"prompt": [300], "max_tokens": 4} | fields))
        self._thread.start()
        self._peer = peer
        self.request = peer.hear(Submit).request

    def _ask(self, client: httpx.Client, body: dict[str, object]) -> None:
        self._replies.append(client.post("/v1/completions", json=body))

    def end(self) -> httpx.Response:
        self._peer.say(Output([Delta(self.request.id, c, (301,), None, "stop") for c in range(self.request.n)]))
        self._thread.join()
        return self._replies[0]


def refusals(client: httpx.Client) -> Iterator[str]:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("tandem_refused_total") and not line.endswith(" 0.0"):
            yield line


def test_concurrent_requests_are_limited_whatever_their_choices():
    with scripted_server(max_concurrent_requests=2) as (client, peer, _):
        first, second = Asking(client, peer, n=3), Asking(client, peer)
        refused = client.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert "connection" not in refused.headers
        assert list(refusals(client)) == ['tandem_refused_total{reason="max_concurrent_requests"} 1.0']
        assert client.get("/health").json()["open_requests"] == 2
        assert first.end().status_code == 200
        third = Asking(client, peer)
        assert {second.end().status_code, third.end().status_code} == {200}
        assert client.get("/v1/engine/metrics").json()["open_choices"] == 0


def test_a_full_pool_refuses_and_an_emptied_one_does_not():
    with scripted_server(memory_pressure_threshold=0.8) as (client, peer, _):
        running = Asking(client, peer)
        peer.say(Occupancy(1, 0, 52, 12))
        until(lambda: client.get("/health").json()["status"] == "overloaded")
        refused = client.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_pressure")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert list(refusals(client)) == ['tandem_refused_total{reason="memory_pressure_threshold"} 1.0']
        assert client.get("/v1/models").status_code == 200
        peer.say(Occupancy(1, 0, 51, 13))
        until(lambda: client.get("/health").json()["status"] != "overloaded")
        other = Asking(client, peer)
        peer.say(Occupancy(2, 0, 64, 0))
        assert {running.end().status_code, other.end().status_code} == {200}
        assert Asking(client, peer).end().status_code == 200  # nothing is open: the engine's last word is old


@pytest.mark.promise("D1")
def test_what_never_fits_is_not_told_to_come_again():
    with scripted_server(max_queue_size=2) as (client, _, _):
        reply = client.post("/v1/completions", json={"prompt": ["a"] * (SEATS + 3), "max_tokens": 1})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
        assert "retry-after" not in reply.headers


def test_a_refusal_does_not_wait_for_the_body():
    """Nor for the engine, which says nothing here; the body is dropped when it comes."""
    with scripted_server(max_concurrent_requests=1) as (client, peer, _):
        running = Asking(client, peer)
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as sock:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            for _ in range(3):
                sock.sendall(head + b"Content-Length: 5000\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}}"):
                    answer += sock.recv(65536)
                assert answer.startswith(b"HTTP/1.1 429")
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "rate_limit_error"
                sock.sendall(b" " * 5000)
        running.end()


def test_tokens_of_prompts_and_answers_are_limited():
    with scripted_server(max_prompt_tokens=8, max_generation_tokens=5) as (client, peer, _):

        def refused(**body: object) -> tuple[int, str, str]:
            reply = client.post("/v1/completions", json=body)
            return reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]

        assert refused(prompt=list(range(300, 309)), max_tokens=1) == (400, "context_length_exceeded", "prompt")
        assert refused(prompt=[300], max_tokens=6) == (400, "context_length_exceeded", "max_tokens")
        chat = client.post("/v1/chat/completions", json=BODY | {"max_tokens": None, "max_completion_tokens": 6})
        assert chat.json()["error"]["param"] in ("messages", "max_completion_tokens")
        default = Asking(client, peer, max_tokens=None)
        assert default.request.params.max_tokens == 5  # the default is 512
        default.end()

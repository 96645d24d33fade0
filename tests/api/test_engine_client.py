"""The client against an engine that behaves in every way, well and badly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from mlx_tandem.config import Config, EngineConfig, ModelConfig
from mlx_tandem.engine.client import EngineClient, wakeable_engine
from mlx_tandem.engine.client.process import process_launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartProgress
from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.engine.client.supervisor import MAX_DEATHS
from mlx_tandem.engine.messages import (
    AdapterLoaded,
    CallDone,
    CallFailed,
    Cancel,
    Drain,
    Failed,
    Fatal,
    Heartbeat,
    LoadAdapter,
    Note,
    Occupancy,
    Output,
    Preempted,
    Progress,
    Started,
    Submit,
    UnloadAdapter,
)
from mlx_tandem.errors import EngineDied, EngineError, EngineUnavailable, InvalidRequest, ModelError, NotFound
from mlx_tandem.types import AdapterSource, Delta, EngineStats, Request, SamplingParams
from tests.api.scripted import ADAPTER, INFO, Peer, ScriptedEngine

Body = Callable[[EngineClient, Peer, ScriptedEngine], Awaitable[None]]


def run(body: Body, **options: object) -> None:
    """`body` with a client whose engine is ready."""

    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch, backoff_seconds=0.0, **options)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            await client.wait_ready()
            try:
                async with asyncio.timeout(15):
                    await body(client, peer, engine)
            finally:
                await client.close()

    asyncio.run(main())


def request(client: EngineClient, n: int = 1) -> Request:
    return Request(client.next_ids(1)[0], (1, 2), SamplingParams(max_tokens=4), None, n)


async def tokens(stream: Stream) -> list[tuple[int, tuple[int, ...]]]:
    return [(stream.index(d), d.tokens) async for deltas in stream for d in deltas]


def test_a_request_from_start_to_end():
    async def body(client, peer, engine):
        r = request(client)
        async with client.submit(r) as stream:
            assert peer.hear(Submit).request == r
            peer.say(Output([Delta(r.id, 0, (5,))]))
            assert [d.tokens for d in await anext(stream)] == [(5,)]
            peer.say(Output([Delta(r.id, 0, (6,))]), Output([Delta(r.id, 0, (7,), None, "length")]))
            assert await tokens(stream) == [(0, (6,)), (0, (7,))]
        assert client.open_requests == 0

    run(body)


def test_several_prompts_are_one_stream():
    async def body(client, peer, engine):
        ids = client.next_ids(2)
        requests = [Request(i, (1,), SamplingParams(max_tokens=1), None, 2) for i in ids]
        async with client.submit(*requests) as stream:
            peer.say(Output([Delta(i, c, (10 * i + c,), None, "stop") for i in ids for c in (0, 1)]))
            assert await tokens(stream) == [(k, (10 * ids[k // 2] + k % 2,)) for k in range(4)]

    run(body)


def test_a_stream_knows_when_its_first_row_was_planned_and_how_often_it_gave_way():
    """Whatever the engine says of requests that nobody reads."""

    async def body(client, peer, engine):
        first, second = client.next_ids(2)
        asked = [Request(id, (1,), SamplingParams(max_tokens=4)) for id in (first, second)]
        unknown = [Started(999, 1.0), Preempted(999), Failed(999, "invalid_value", "no"), Output([Delta(999, 0, (1,))])]
        async with client.submit(*asked) as stream:
            assert (stream.started, stream.preemptions) == (None, 0)
            peer.say(*unknown, Started(second, 5.0), Started(first, 7.0), Preempted(first), Preempted(second))
            peer.say(Output([Delta(id, 0, (3,), None, "stop") for id in (first, second)]))
            assert await tokens(stream) == [(0, (3,)), (1, (3,))]
            assert (stream.started, stream.preemptions) == (5.0, 2)
            peer.say(Started(first, 9.0), Preempted(first))
        r = request(client)
        async with client.submit(r) as other:
            peer.say(Output([Delta(r.id, 0, (4,), None, "stop")]))
            assert await tokens(other) == [(0, (4,))]
        assert (stream.started, stream.preemptions, other.started) == (5.0, 2, None)

    run(body)


@pytest.mark.promise("FLT-40")
def test_leaving_early_cancels():
    async def body(client, peer, engine):
        r = request(client, n=3)
        async with client.submit(r) as stream:
            peer.hear(Submit)
            stream.cancel(1)
            assert peer.hear(Cancel) == Cancel(r.id, 1)
            peer.say(Output([Delta(r.id, 1, (9,)), Delta(r.id, 0, (5,))]))
            assert [d.choice for d in await anext(stream)] == [0]  # what a cancelled choice still says is dropped
        assert peer.hear(Cancel) == Cancel(r.id)
        peer.say(Output([Delta(r.id, 0, (5,))]), Failed(r.id, "x", "late"))  # nobody is surprised
        other = request(client)
        async with client.submit(other) as stream:
            assert peer.hear(Submit).request == other
            peer.say(Output([Delta(other.id, 0, (1,), None, "stop")]))
            await tokens(stream)

    run(body)


def test_cancelling_the_last_choice_ends_the_stream():
    async def body(client, peer, engine):
        r = request(client, n=2)
        async with client.submit(r) as stream:
            peer.hear(Submit)
            peer.say(Output([Delta(r.id, 0, (5,), None, "stop")]))
            await anext(stream)
            stream.cancel(1)
            assert peer.hear(Cancel) == Cancel(r.id)
            assert await tokens(stream) == []
        assert client.open_requests == 0

    run(body)


@pytest.mark.promise("FLT-02")
@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        (Failed(1, "context_length_exceeded", "too long", "prompt", False), InvalidRequest),
        (Failed(1, "model_not_found", "gone", "model", False), InvalidRequest),
        (Failed(1, "numerical_error", "not finite"), EngineError),
    ],
)
def test_one_request_fails_alone(failed, kind):
    async def body(client, peer, engine):
        bad, good = request(client), request(client)
        assert bad.id == 1
        async with client.submit(bad) as first, client.submit(good) as second:
            peer.say(Output([Delta(bad.id, 0, (5,))]), failed)
            peer.say(Output([Delta(good.id, 0, (6,), None, "stop")]))
            assert [d.tokens for d in await anext(first)] == [(5,)]  # what came before the error is not lost
            with pytest.raises(kind) as e:
                await anext(first)
            assert (e.value.code, e.value.message, e.value.param) == (failed.code, failed.message, failed.param)
            assert await tokens(second) == [(0, (6,))]

    run(body)


def test_a_choice_is_cancelled_by_its_number_within_its_own_request():
    async def body(client, peer, engine):
        ids = client.next_ids(2)
        requests = [Request(i, (1,), SamplingParams(max_tokens=4), None, 3) for i in ids]
        async with client.submit(*requests) as stream:
            for _ in ids:
                peer.hear(Submit)
            stream.cancel(4)
            assert peer.hear(Cancel) == Cancel(ids[1], 1)

    run(body)


def test_calls_and_their_errors():
    async def body(client, peer, engine):
        loading = asyncio.create_task(client.load_adapter(AdapterSource("/a")))
        refused = [asyncio.create_task(client.load_adapter(AdapterSource("/b"))) for _ in range(3)]
        await asyncio.sleep(0)
        call = await asyncio.to_thread(peer.hear, LoadAdapter)
        assert call.source.path == "/a"
        calls = [(await asyncio.to_thread(peer.hear, LoadAdapter)).call for _ in refused]
        codes = [("invalid_adapter", ModelError), ("not_found", NotFound), ("strange", InvalidRequest)]
        for c, (code, _) in zip(calls, codes, strict=True):
            peer.say(CallFailed(c, code, "lora_alpha is NaN", "lora_alpha"))
        peer.say(AdapterLoaded(call.call, ADAPTER))
        assert await loading == ADAPTER
        for task, (code, kind) in zip(refused, codes, strict=True):
            with pytest.raises(kind) as e:
                await task
            assert (e.value.param, e.value.code) == ("lora_alpha", code)
        removing = asyncio.create_task(client.unload_adapter("d"))
        peer.say(CallDone((await asyncio.to_thread(peer.hear, UnloadAdapter)).call))
        await removing

    run(body)


def test_an_answer_for_somebody_who_has_left_harms_nobody():
    """Nor does one that comes twice."""

    async def body(client, peer, engine):
        leaving = asyncio.create_task(client.load_adapter(AdapterSource("/a")))
        staying = asyncio.create_task(client.load_adapter(AdapterSource("/b")))
        calls = [(await asyncio.to_thread(peer.hear, LoadAdapter)).call for _ in range(2)]
        leaving.cancel()
        await asyncio.wait([leaving])
        peer.say(*[AdapterLoaded(call, ADAPTER) for call in [*calls, *calls]])
        assert await staying == ADAPTER
        removing = asyncio.create_task(client.unload_adapter("d"))
        call = (await asyncio.to_thread(peer.hear, UnloadAdapter)).call
        peer.say(CallFailed(calls[0], "not_found", "too late"), CallDone(call))
        await removing
        assert client.state == "ready" and engine.launches == 1

    run(body)


def test_death_ends_streams_and_calls_at_once_and_starts_another_engine():
    readied = 0

    async def on_ready() -> None:
        nonlocal readied
        readied += 1

    async def body(client, peer, engine):
        async with client.submit(request(client)) as stream:
            call = asyncio.create_task(client.load_adapter(AdapterSource("/a")))
            await asyncio.to_thread(peer.hear, Submit)
            peer.die()
            with pytest.raises(EngineDied):
                await anext(stream)
            with pytest.raises(EngineDied):
                await call
        assert client.state == "restarting"
        with pytest.raises(EngineUnavailable, match="restarting"):
            client.submit(request(client))
        second = await asyncio.to_thread(engine.peer)
        second.say(Progress("weights", 0.5))
        second.ready()
        while client.state != "ready":
            await asyncio.sleep(0.01)
        assert (readied, client.restarts, engine.launches) == (2, 1, 2)
        r = request(client)
        async with client.submit(r) as stream:
            second.say(Output([Delta(r.id, 0, (1,), None, "stop")]))
            await tokens(stream)

    run(body, on_ready=on_ready)


def test_an_engine_may_say_later_what_has_changed_about_it():
    """As it does when the kernels of adapters are chosen; that begins nothing anew."""
    readied = 0

    async def on_ready():
        nonlocal readied
        readied += 1

    async def body(client, peer, engine):
        peer.ready(structs.replace(INFO, lora_backend="fused"))
        while client.info is None or client.info.lora_backend != "fused":
            await asyncio.sleep(0.01)
        assert (client.state, readied, client.restarts) == ("ready", 1, 0)
        r = request(client)
        async with client.submit(r) as stream:
            peer.say(Output([Delta(r.id, 0, (1,), None, "stop")]))
            await tokens(stream)

    run(body, on_ready=on_ready)


def test_a_start_says_how_long_it_will_take_by_the_one_before(tmp_path):
    """Also a restart after the death of an engine; and the times are kept for the next server."""
    kept = KeptTimes(tmp_path / "starts", Config(EngineConfig(ModelConfig("/model"))))
    shown: list[StartProgress] = []

    async def body(client, peer, engine):
        while kept.find() is None:  # another thread writes it
            await asyncio.sleep(0.01)
        assert {progress.left_s for progress in shown} == {None}
        shown.clear()
        peer.die()
        second = await asyncio.to_thread(engine.peer)
        second.say(Progress("weights", 0.5), Progress("checking attention", 0.0, True))
        second.ready()
        while client.state != "ready":
            await asyncio.sleep(0.01)
        assert ("weights", 0.5) in {progress[:2] for progress in shown}
        assert all(progress.left_s is not None for progress in shown if progress.stage in ("starting", "weights"))
        assert client.progress.stage == "loading adapters"

    run(body, times=kept, on_progress=shown.append)


def test_an_engine_that_was_ready_is_started_again_however_often_it_dies():
    """Deaths at starts are counted, and each engine that gets ready begins the count anew."""

    async def body(client, peer, engine):
        for deaths in range(1, 2 * MAX_DEATHS):
            peer.die()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            while client.state != "ready":
                assert client.failure is None
                await asyncio.sleep(0.01)
            assert client.restarts == deaths

    run(body)


def test_the_occupancy_of_an_engine_that_died_is_not_that_of_the_next():
    async def body(client, peer, engine):
        peer.say(Occupancy(running=3, waiting=2, used_blocks=60, free_blocks=4))
        while client.occupancy.running != 3:
            await asyncio.sleep(0.01)
        peer.die()
        await asyncio.to_thread(engine.peer)
        assert client.occupancy == Occupancy()

    run(body)


def test_requests_wait_for_what_on_ready_does():
    states: list[str] = []
    client: EngineClient

    async def on_ready() -> None:
        states.append(client.state)
        await client.load_adapter(AdapterSource("/a"))
        states.append(client.state)

    async def main() -> None:
        nonlocal client
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch, on_ready=on_ready)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            call = await asyncio.to_thread(peer.hear, LoadAdapter)
            peer.say(AdapterLoaded(call.call, ADAPTER))
            await client.wait_ready()
            assert states == ["starting", "starting"]
            assert client.state == "ready"
            await client.close()

    asyncio.run(main())


def test_what_was_begun_for_an_engine_that_died_does_not_make_the_next_one_ready():
    async def main() -> None:
        begun: list[asyncio.Event] = []
        done: list[int] = []

        async def on_ready() -> None:
            number = len(begun)
            begun.append(asyncio.Event())
            await begun[number].wait()
            done.append(number)

        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch, backoff_seconds=0.0, on_ready=on_ready)
            await client.start()
            for number in range(2):
                peer = (await asyncio.to_thread(engine.peer)).ready()
                while len(begun) == number:
                    await asyncio.sleep(0.01)
                if number == 0:
                    peer.die()
            begun[0].set()
            for _ in range(10):
                await asyncio.sleep(0)
            assert client.state == "starting" and not done
            begun[1].set()
            await client.wait_ready()
            assert client.state == "ready" and done == [1]
            await client.close()

    asyncio.run(main())


@pytest.mark.promise("FLT-10")
def test_an_engine_that_hangs_is_killed():
    async def body(client, peer, engine):
        async with client.submit(request(client)) as stream:
            with pytest.raises(EngineDied):
                await anext(stream)
        await asyncio.to_thread(peer.killed.wait, 20)
        assert peer.killed.is_set()

    run(body, stall_seconds=0.3)


@pytest.mark.promise("FLT-13", "FLT-59")
def test_a_loop_whose_clock_jumps_an_hour_ends_nothing():
    """As uvloop's does on macOS when the machine has slept."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch, backoff_seconds=0.0, stall_seconds=60.0)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            await client.wait_ready()
            r = request(client)
            async with client.submit(r) as stream:
                slept = loop.time() + 3600
                loop.time = lambda: slept + time.monotonic()  # type: ignore[method-assign]
                for _ in range(20):  # all timers are due
                    await asyncio.sleep(0)
                peer.say(Heartbeat(EngineStats(steps=7)))
                while client.stats.steps != 7 and client.state == "ready":
                    await asyncio.sleep(0.01)
                assert (client.state, client.restarts, engine.launches) == ("ready", 0, 1)
                peer.say(Output([Delta(r.id, 0, (1,), None, "length")]))
                assert await tokens(stream) == [(0, (1,))]
            await client.close()

    asyncio.run(main())


def test_counters_are_read_from_the_engine_that_is_there(monkeypatch: pytest.MonkeyPatch):
    """Counters go on after the end of an engine, and nobody waits for an engine that does not answer."""

    async def body(client, peer, engine):
        peer.say(Heartbeat(EngineStats(steps=7, active_memory=9)), Occupancy(running=3))
        await client.refresh()
        assert (client.stats.steps, client.occupancy.running) == (7, 3)
        peer.die()
        second = await asyncio.to_thread(engine.peer)
        await client.refresh()
        assert (client.stats, client.occupancy) == (EngineStats(steps=7), Occupancy())
        second.ready()
        while client.state != "ready":
            await asyncio.sleep(0.01)
        second.is_silent = True
        monkeypatch.setattr(wakeable_engine, "REPORT_SECONDS", 0.01)
        await client.refresh()
        assert client.state == "ready"

    run(body)


def test_heartbeats_keep_it_alive_and_carry_the_statistics():
    async def body(client, peer, engine):
        for steps in range(1, 8):
            peer.say(Heartbeat(EngineStats(steps=steps)))
            while client.stats.steps != steps:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        assert client.state == "ready"
        assert engine.launches == 1

    run(body, stall_seconds=0.5)


def test_what_an_engine_notes_is_logged_by_the_front(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client, peer, engine):
        peer.die()
        second = await asyncio.to_thread(engine.peer)
        second.say(Note(logging.WARNING, "100 %s of it", ("Traceback", "ValueError")), Note(logging.INFO, "fine"))
        second.ready()
        while client.state != "ready":
            await asyncio.sleep(0.01)

    with caplog.at_level(logging.INFO, "mlx_tandem"):
        run(body)
    noted = [(r.levelname, r.getMessage(), r.fields) for r in caplog.records if r.getMessage() != "engine ended"]
    assert noted == [("WARNING", "100 %s of it", {"trace": ("Traceback", "ValueError")}), ("INFO", "fine", {})]


def test_garbage_on_the_wire_is_a_death():
    async def body(client, peer, engine):
        async with client.submit(request(client)) as stream:
            peer._channel._socket.sendall(b"\xff\xff\xff\xff")
            with pytest.raises(EngineDied):
                await anext(stream)

    run(body)


def test_a_model_that_cannot_be_loaded_is_said_once():
    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch)
            await client.start()
            peer = await asyncio.to_thread(engine.peer)
            peer.say(Progress("weights", 0.0), Fatal("unsupported_model", "mamba is not supported"))
            peer.die()
            with pytest.raises(ModelError, match="mamba is not supported"):
                await client.wait_ready()
            assert (client.state, engine.launches) == ("dead", 1)
            with pytest.raises(ModelError):
                await client.wait_dead()
            await client.close()

    asyncio.run(main())


def test_an_adapter_of_the_configuration_that_cannot_be_loaded_ends_the_start():
    async def on_ready() -> None:
        raise ModelError("adapter_config.json is missing")

    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch, on_ready=on_ready)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            with pytest.raises(ModelError, match="adapter_config"):
                await client.wait_ready()
            assert await asyncio.to_thread(peer.hears_the_end)
            await client.close()

    asyncio.run(main())


def test_an_engine_that_never_gets_ready_is_given_up():
    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch, backoff_seconds=0.0)
            await client.start()
            for _ in range(MAX_DEATHS):
                (await asyncio.to_thread(engine.peer)).die()
            with pytest.raises(
                EngineError, match="ended 3 times before it was ready; the last time: ended with status 9"
            ):
                await client.wait_ready()
            assert (client.state, engine.launches) == ("dead", MAX_DEATHS)
            with pytest.raises(EngineUnavailable):
                client.check_ready()
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("words", "says"),
    [((), "ended 3 times before it was ready"), ((Fatal("engine_error", "the last one's trouble"),), "the last one's")],
)
def test_an_engine_that_is_given_up_says_why_the_last_one_ended(words: tuple[Fatal, ...], says: str):
    """Not what an earlier one had said of its own end."""

    async def body(client, peer, engine):
        peer.say(Fatal("engine_error", "the first one's trouble"))
        peer.die()
        for left in reversed(range(MAX_DEATHS - 1)):
            peer = await asyncio.to_thread(engine.peer)
            peer.say(*(words if not left else ()))
            peer.die()
        with pytest.raises(EngineError, match=says):
            await client.wait_dead()

    run(body)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import no_such_module", "ended with status 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit('no driver for this device')", "ended with status 1: no driver for this device"),
        ("import os; os._exit(3)", "ended with status 3"),
        (
            "import os, signal, sys; print('ERROR engine: gone\x1b[2J', file=sys.stderr, flush=True); "
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"died of SIGKILL (Something outside ended it, mostly the system for lack of memory. "
            r"Close other programs.): ERROR engine: gone\x1b[2J",
        ),
        (
            "import faulthandler, os; faulthandler.enable(); os.abort()",
            "died of SIGABRT (A library has ended the process; its last lines say why.): Fatal Python error: Aborted",
        ),
    ],
)
def test_why_an_engine_never_got_ready_is_told(program: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its exit status and its last words; all that it writes is in our own log, a printable line at a time."""

    async def main() -> None:
        launch = process_launch(EngineConfig(ModelConfig("nowhere")), ("-c", program))
        client = EngineClient(launch, backoff_seconds=0.0)
        await client.start()
        with pytest.raises(EngineError) as e:
            await client.wait_ready()
        assert e.value.message == f"the engine ended 3 times before it was ready; the last time: {says}"
        await client.close()

    asyncio.run(main())
    written = capfd.readouterr().err.splitlines()
    assert says.partition(": ")[2] in ["", *written]
    assert all(line.isprintable() for line in written)


def test_of_what_an_engine_wrote_the_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """However much and whatever it is."""
    program = (
        r"import sys; write = sys.stderr.buffer.write; "
        r"write(b'x' * 1_000_000 + b'\n' + b'\xff\n' * 10_000 + b'ValueError: the cause\n')"
    )
    ours, process = process_launch(EngineConfig(ModelConfig("nowhere")), ("-c", program))()
    with ours:
        assert process.wait(30.0) == 0
        assert process.last_words() == "ValueError: the cause"
    assert r"\xff" in capfd.readouterr().err


def test_what_an_engine_logs_is_logged_here(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A line becomes a record of the same logger and level, so one setting forms all lines. Other text is passed on."""
    program = (
        "import sys; write = sys.stderr.write; write('WARNING mlx_tandem.engine.drafting: drafts are off %s\\n'); "
        "write('    ValueError: why\\n'); write('WARNING other: text\\n'); "
        "write('x' * 4096 + 'ERROR mlx_tandem: forged\\n')"
    )
    ours, process = process_launch(EngineConfig(ModelConfig("nowhere")), ("-c", program))()
    with ours:
        assert process.wait(30.0) == 0
        assert process.last_words() == "ValueError: why"
    assert caplog.record_tuples == [("mlx_tandem.engine.drafting", logging.WARNING, "drafts are off %s")]
    passed_on = capfd.readouterr().err.splitlines()
    assert passed_on[:2] == ["    ValueError: why", "WARNING other: text"]
    assert passed_on[-1] == "ERROR mlx_tandem: forged"


def test_closing_in_the_moment_in_which_a_wait_times_out_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's task is being cancelled then, by the timeout of its own wait."""

    async def body(client, peer, engine):
        closed = asyncio.get_running_loop().create_future()
        expire = asyncio.Timeout._on_timeout

        def close_first(timeout: asyncio.Timeout) -> None:
            if timeout._task is client._supervisor and not closed.done():
                closed.set_result(asyncio.create_task(client.close()))  # its first step comes before the supervisor's
            expire(timeout)

        monkeypatch.setattr(asyncio.Timeout, "_on_timeout", close_first)
        await (await closed)
        assert client._supervisor.done()

    run(body)


def test_draining_lets_run_what_runs():
    async def body(client, peer, engine):
        r = request(client)
        async with client.submit(r) as stream:
            peer.hear(Submit)
            draining = asyncio.create_task(client.drain(20))
            await asyncio.to_thread(peer.hear, Drain)
            with pytest.raises(EngineUnavailable, match="shutting down"):
                client.submit(request(client))
            peer.say(Output([Delta(r.id, 0, (1,), None, "stop")]))
            peer.die()
            assert await tokens(stream) == [(0, (1,))]
            assert await draining
        assert engine.launches == 1

    run(body)


def test_draining_ends_at_its_limit():
    async def body(client, peer, engine):
        async with client.submit(request(client)) as stream:
            peer.hear(Submit)
            assert not await client.drain(0.1)
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await anext(stream)

    run(body)

"""Reward functions that misbehave in every way: each loses the one score that it was to give."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.rewards import RewardPool, Sample

FUNCTIONS = """
import ctypes, os, signal, socket, subprocess, sys, threading, time

KEPT = []

def honest(sample, options): return 1.0
def truthful(sample, options): return True
def pid(sample, options): return os.getpid() / 1000
def echo(sample, options): return float(sample.metadata["value"])
def heavy(sample, options): return float(bool({"mlx", "typer", "starlette", "numpy"} & sys.modules.keys()))

def sleeps(sample, options): time.sleep(1000)
def deadlocks(sample, options):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
def spins(sample, options):
    while True:
        try:
            while True: pass
        except BaseException: pass
def stops_the_clock(sample, options):
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(1000)
def stops(sample, options): os.kill(os.getpid(), signal.SIGSTOP)

def raises(sample, options): raise KeyError(sample.prompt)
def exits(sample, options): sys.exit(0)
def interrupts(sample, options): raise KeyboardInterrupt
def recurses(sample, options): return recurses(sample, options)
def deletes(sample, options): del sample.prompt

def nan(sample, options): return float("nan")
def inf(sample, options): return float("inf")
def text(sample, options): return "1.0"
def nothing(sample, options): return None
def large(sample, options): return 1e30
def huge(sample, options): return 10 ** 400
async def awaited(sample, options): return 1.0

def leaves(sample, options): os._exit(0)
def crashes(sample, options): ctypes.string_at(0)
def closes(sample, options): os.closerange(3, 256); time.sleep(1000)
def chatters(sample, options):
    for fd in range(3, 256):
        try: os.write(fd, b"x" * 4096)
        except OSError: pass
    time.sleep(1000)

def allocates(sample, options): return float(len(bytearray(1 << 33)))
def hoards(sample, options):
    while True: KEPT.append(bytes(1 << 20))

def forks(sample, options):
    os.fork()
    return 1.0
def prints(sample, options):
    print("x" * 10_000_000, flush=True)
    os.write(1, b"\\0" * 1000)
    return 1.0
def changes(sample, options):
    value = float(len(sample.metadata) + len(options))
    sample.metadata.clear(); options["more"] = 1
    return value
def spawns(sample, options):
    subprocess.Popen(["sleep", "1000"], stdout=open(sample.metadata["fifo"], "wb"))
    return 1.0
def waits(sample, options):
    with open(sample.metadata["fifo"], "wb", buffering=0) as fifo:
        fifo.write(b"x")
        time.sleep(1000)
"""
NAMES = [line.split("(")[0].split()[-1] for line in FUNCTIONS.splitlines() if line.startswith(("def ", "async def "))]


def install(folder: Path, package: str, points: dict[str, str]) -> None:
    """What pip leaves of a package that has entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[mlx_tandem.rewards]\n{lines}")


@pytest.fixture(autouse=True)
def own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "misbehaving_rewards.py").write_text(FUNCTIONS)
    points = {name: f"misbehaving_rewards:{name}" for name in NAMES}
    install(tmp_path, "misbehaving", points | {"absent": "no_such_module_anywhere:f"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def with_pool(use: Callable[[RewardPool], Awaitable[None]], **config: Any) -> None:
    async def run() -> None:
        pool = RewardPool(RLTrainingConfig(**config))
        try:
            await use(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 120))


async def scores(pool: RewardPool, *functions: str, **metadata: Any) -> list[float | None]:
    scoring = [pool.check(f, {"answer": "a"} | metadata) for f in functions]
    return await pool.score(scoring, [Sample("the prompt", "a", tokens=1)] * len(functions))


@pytest.mark.promise("I4")
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        *[(f, "timeout") for f in ("sleeps", "deadlocks", "spins", "stops_the_clock", "stops")],
        *[(f, "raised") for f in ("raises", "exits", "interrupts", "recurses", "deletes", "absent")],
        *[(f, "invalid") for f in ("nan", "inf", "text", "nothing", "large", "huge", "awaited")],
        *[(f, "died") for f in ("leaves", "crashes", "closes", "chatters")],
        pytest.param("allocates", "memory", marks=pytest.mark.skipif(sys.platform != "linux", reason="no such limit")),
        ("hoards", "memory"),
    ],
)
def test_a_function_loses_its_own_score_only(function: str, kind: str) -> None:
    async def use(pool: RewardPool) -> None:
        assert await scores(pool, "honest", "exact_match", function, "gsm8k", "honest", answer="5") == [
            *(1.0, 0.0, None, 0.0, 1.0)
        ]
        assert {k: n for k, n in pool.failures.items() if n} == {kind: 1}
        assert await scores(pool, "honest", "truthful") == [1.0, 1.0]

    with_pool(use, reward_timeout_s=0.5, reward_memory_mb=64)


def test_part_of_a_composite_loses_the_whole() -> None:
    async def use(pool: RewardPool) -> None:
        scoring = [pool.check({"honest": 1.0, f: 0.0}, {}) for f in ("raises", "truthful")]
        assert await pool.score(scoring, [Sample("", "")] * 2) == [None, 1.0]

    with_pool(use)


def test_what_does_no_harm() -> None:
    """Copies, output and changes of the input stay where they are."""

    async def use(pool: RewardPool) -> None:
        assert await scores(pool, "forks", "prints", "changes", "changes", "honest") == [1.0, 1.0, 1.0, 1.0, 1.0]
        twice = pool.check([{"function": "changes"}] * 2, {"a": 1})
        assert await pool.score([twice], [Sample("", "")]) == [2.0]
        assert twice.metadata == {"a": 1}

    with_pool(use)


def test_prompts_are_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def use(pool: RewardPool) -> None:
        assert await scores(pool, "raises", "raises", "raises") == [None] * 3

    with_pool(use)
    assert caplog.messages == ["a completion has no reward of raises: raised KeyError"]


@pytest.mark.promise("FLT-50")
def test_a_killed_worker_costs_nothing() -> None:
    async def use(pool: RewardPool) -> None:
        (before,) = await scores(pool, "pid")
        assert before is not None
        os.kill(round(before * 1000), signal.SIGKILL)
        (after,) = await scores(pool, "pid")
        assert after is not None and after != before
        assert set(pool.failures.values()) == {0}

    with_pool(use)


def test_one_worker_serves_many_calls_and_imports_little() -> None:
    async def use(pool: RewardPool) -> None:
        assert len({(await scores(pool, "pid"))[0] for _ in range(5)}) == 1
        assert await scores(pool, "heavy") == [0.0]
        assert "misbehaving_rewards" not in sys.modules

    with_pool(use)


def test_values_up_to_the_limit_pass() -> None:
    async def use(pool: RewardPool) -> None:
        scoring = [pool.check("echo", {"value": v}) for v in (1e6, -1e6, 1e6 + 1, -7)]
        assert await pool.score(scoring, [Sample("", "")] * 4) == [1e6, -1e6, None, -7.0]
        tripled = pool.check({"echo": 3.0}, {"value": 5e5})
        assert await pool.score([tripled], [Sample("", "")]) == [None]

    with_pool(use)


def test_what_cannot_be_sent_is_lost_alone() -> None:
    async def use(pool: RewardPool) -> None:
        samples = [Sample("", text) for text in ("a", "\ud800", "x" * (17 << 20), "a")]
        assert await pool.score([pool.check("honest", {})] * 4, samples) == [1.0, None, None, 1.0]
        assert (pool.failures["invalid"], pool.failures["too_large"]) == (1, 1)

    with_pool(use)


def test_a_schema_whose_references_multiply_is_lost_alone() -> None:
    async def use(pool: RewardPool) -> None:
        schema: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
        bomb = {"$defs": schema | {"d60": {"type": "object"}}, "$ref": "#/$defs/d0"}
        scoring = [pool.check("json_schema", {"schema": s}) for s in ({}, bomb, {"$ref": "#"}, {"type": "object"})]
        first, second, _, last = await pool.score(scoring, [Sample("", "{}")] * 4)
        assert (first, second, last) == (1.0, None, 1.0)

    with_pool(use, reward_timeout_s=0.5)


def test_children_of_a_worker_end_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def use(pool: RewardPool) -> None:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert await scores(pool, "spawns", fifo=str(fifo)) == [1.0]
            assert select.select([reader], [], [], 0) == ([], [], [])
            await pool.close()
            assert select.select([reader], [], [], 30) == ([reader], [], [])  # its other end is closed
            assert os.read(reader, 1) == b""
        finally:
            os.close(reader)

    with_pool(use)


def test_closing_while_functions_run(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def use(pool: RewardPool) -> None:
        running = asyncio.create_task(scores(pool, "honest", "waits", "honest", fifo=str(fifo)))
        reader = await asyncio.to_thread(open, fifo, "rb")
        with reader:
            assert await asyncio.to_thread(reader.read, 1) == b"x"
            await pool.close()
            assert await running == [1.0, None, None]

    with_pool(use, reward_timeout_s=1000.0)


def test_a_worker_does_not_outlive_the_server(tmp_path: Path) -> None:
    """It is in the middle of an item when the server is killed: the time limit ends it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"""
import asyncio
from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.training.rewards import RewardPool, Sample
pool = RewardPool(RLTrainingConfig(reward_timeout_s=2.0))
scoring = [pool.check("waits", metadata) for metadata in ({{}}, {{"fifo": {str(fifo)!r}}})]
asyncio.run(pool.score(scoring, [Sample("", "")] * 2))
"""
    with subprocess.Popen([sys.executable, "-c", program]) as front, open(fifo, "rb") as reader:
        assert reader.read(1) == b"x"
        front.kill()
        assert reader.read() == b""


def test_memory_is_watched_where_nothing_limits_it() -> None:
    program = (
        "import threading\n"
        "from mlx_tandem.isolation.program import watch_memory\n"
        "watch_memory(64 << 20)\n"
        "kept = b'x' * (256 << 20)\n"
        "threading.Event().wait()\n"
    )
    # Through a shell: Linux counts what a process was before `exec` into its peak, which here would be these tests'.
    words = ["sh", "-c", '"$0" "$@"; exit $?', sys.executable, "-c", program]
    assert subprocess.run(words, timeout=60, check=False).returncode == 86


def test_nothing_starts_before_the_first_score() -> None:
    async def use(pool: RewardPool) -> None:
        pool.check("honest", {})
        assert [w._child for w in pool._workers] == [None]
        assert await pool.score([], []) == []
        assert [w._child for w in pool._workers] == [None]

    with_pool(use)


@pytest.mark.parametrize(
    "points", [{"gsm8k": "x:y"}, {"honest": "other:honest"}, {"a/b": "x:y"}, {"x" * 65: "x:y"}], ids=str
)
def test_clashing_and_illegal_names_of_installed_functions(own_functions: Path, points: dict[str, str]) -> None:
    install(own_functions, "another", points)
    with pytest.raises(InvalidRequest):
        RewardPool(RLTrainingConfig())


@pytest.mark.promise("A7")
@pytest.mark.parametrize("name", ["misbehaving_rewards:honest", "subprocess.call", "no-such"])
def test_only_registered_names_can_be_asked_for(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RewardPool(RLTrainingConfig()).check(name, {})
    assert caught.value.param == "scoring_function"

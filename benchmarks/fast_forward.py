"""A day of learning in fast forward: changing traffic, kills, full drives; what may not grow, and what may not fall.

    python -m benchmarks.fast_forward --json-out benchmarks/results/fast_forward.json

Learner, database, checkpoints, guard, recorder, registry and reward workers are the server's own classes, in processes
of their own that are killed (SIGKILL) at random moments and started again; `tests/simulated.py` has the engine,
which dies at random moments, too. The clock is given, and nothing sleeps. The server's bounds are made smaller so that
a day reaches all of them. Prompts change by the hour: their kind, how hard they are, how often they come, whether one
or eight answers are wanted; there are hours in which every answer gets the same reward. For some hours the operator
sets a learning rate that destroys the policy. For a quarter of an hour now and then the drive is full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlx_tandem import files
from mlx_tandem.adapters import registry
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.config import CheckpointingConfig, Config, EngineConfig, ModelConfig, RLTrainingConfig
from mlx_tandem.errors import TandemError
from mlx_tandem.training import trajectories
from mlx_tandem.training.online import curriculum, learner, loop, states
from mlx_tandem.training.store import database, rows
from tests.simulated import HOPELESS, KINDS, LEVELS, POLICY, Server, Weights

ROOT = Path(__file__).resolve().parents[1]
HOUR = 3600.0
RATE = 0.03
TOO_FAST = 8.0
"""So many times the rate the operator sets for some hours, which destroys the policy."""

FEW = {"BEHIND": 32 << 10, "SEEN_IDS": 1024, "RECORDED": 64, "MOST_UPDATES": 50, "MOST_PAST": 50, "REMEMBERED": 16}
"""Bounds of the server, made smaller so that a day reaches them: bytes that wait for the drive, ids, prompts, updates,
trajectories that are past, names of adapters that are gone.
"""

BUFFER = 256
KEEP = 3

STORE = database.Database.write
"""The server's own way to write to the database."""

MOST: dict[str, float] = {
    "buffered": BUFFER,
    "ids": max(FEW["SEEN_IDS"], 2 * BUFFER),
    "prompts recorded": FEW["RECORDED"],
    "prompts waiting": 64,
    "reports": FEW["MOST_UPDATES"],
    "versions": 3 + KEEP + 5,
    "names": 1 + KEEP + 4,
    "names' versions": 3 + KEEP + 5 + KEEP + 4,
    "names remembered": FEW["REMEMBERED"] + KEEP + 6,
    "means": 3 + KEEP + 5,
    "adapters in the engine": 3 + KEEP + 6,
    "checkpoints": KEEP + 4,
    "files": 4 * (KEEP + 4) + 2 * states.KEPT + 8,
    "database bytes": 1 << 20,
    "log bytes": 8 << 20,
    "bytes not written": 2 * FEW["BEHIND"],
    "manifest bytes": 16 << 10,
    "tasks": 40,
    "descriptors": 40,
}
"""The most of each thing that there may ever be."""

GROWTH = 1.25
"""A process may hold so many times as many objects, and as much memory, as after its first hour."""


CHANCE = 0.2
"""A mean reward may fall by this much by chance: two standard deviations of the mean of some two dozen answers, each of
which is right or wrong."""


class Plan:
    """The events of a simulated day and their times, which depend on the seed alone."""

    def __init__(self, seed: int, hours: float, kills: int) -> None:
        self.hours, self._seed = hours, seed
        rng = random.Random(f"plan {seed}")
        self.kills = sorted(rng.uniform(0.02, 0.98) * hours * HOUR for _ in range(kills))
        self.engine_kills = sorted(rng.uniform(0.02, 0.98) * hours * HOUR for _ in range(2 * kills))
        full = [rng.uniform(0.05, 0.85) * hours * HOUR for _ in range(max(kills // 3, 1))]
        self._full = [(at, at + HOUR / 4) for at in full]
        self._fast = (0.4 * hours * HOUR, 0.5 * hours * HOUR)

    def is_full(self, now: float) -> bool:
        """Return whether the drive is full."""
        return any(a <= now < b for a, b in self._full)

    def rate(self, now: float) -> float:
        """Return the learning rate that a server which starts now is given."""
        return RATE * TOO_FAST if self._fast[0] <= now < self._fast[1] else RATE

    def restarts(self, before: float, now: float) -> bool:
        """Return whether the operator restarts the server with another rate between two moments."""
        return any(before < at <= now for at in self._fast)

    def traffic(self, now: float) -> Traffic:
        """Return the traffic of this hour."""
        hour = int(now / HOUR)
        rng = random.Random(f"hour {self._seed} {hour}")
        weights = tuple(rng.random() ** 2 + 0.02 for _ in range(KINDS))
        low = rng.randrange(LEVELS // 2)
        # What the rate has destroyed shows when some answers are right.
        tells = self._fast[0] - HOUR < hour * HOUR < self._fast[1] + HOUR
        hopeless = rng.random() < 0.15 and not tells
        levels = (HOPELESS, HOPELESS) if hopeless else (low, rng.randrange(low + 3, LEVELS))
        return Traffic(weights, levels, seconds=rng.choice((20, 40, 80)), single=rng.random() < 0.3)


@dataclass(frozen=True)
class Traffic:
    """The traffic of an hour."""

    weights: tuple[float, ...]  # of the kinds
    levels: tuple[int, int]
    seconds: float  # between two requests, on average
    single: bool  # one answer to each request, rather than eight


@dataclass
class Found:
    """The observations of a run."""

    start: float = 0.0
    rewards: list[float] = field(default_factory=list)  # of the served version, at the end of each hour
    most: dict[str, float] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)  # by which factor, in the process in which it was most
    faults: list[str] = field(default_factory=list)
    lives: int = 0
    engine_deaths: int = 0
    refusals: int = 0  # requests while no engine was there
    requests: int = 0
    full: int = 0  # requests while the drive was full
    updates: int = 0
    rollbacks: int = 0
    scale: float = 0.0

    def see(self, life: dict[str, Any]) -> None:
        """Take what a process has written about an hour."""
        if life["reward"] is not None:
            self.rewards.append(life["reward"])
        for name, value in life["counts"].items():
            self.most[name] = max(self.most.get(name, 0), value)


def settings(folder: Path, rate: float, validated: bool) -> Config:
    """Return the settings of the server."""
    training = RLTrainingConfig(
        enabled=True,
        adapter=POLICY,
        learning_rate=rate,
        update_frequency=32,
        trajectory_buffer_size=BUFFER,
        max_staleness=8,
        scoring_function="exact_match",
        validation_prompts=str(folder / "validation.jsonl") if validated else "",
    )
    return Config(
        EngineConfig(ModelConfig("base")),
        rl_training=training,
        checkpointing=CheckpointingConfig(str(folder / "checkpoints"), interval=25, keep_n_checkpoints=KEEP),
    )


def write_validation(file: Path) -> None:
    """Write prompts of all kinds and levels."""
    lines = [
        {"prompt": f"{k} {i}", "scoring_function": "exact_match", "metadata": {"answer": "right"}, "max_tokens": 2}
        for k in range(KINDS)
        for i in range(0, LEVELS, 2)
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")


class Life:
    """One process, from a moment of the day until it is killed, or until the operator ends it."""

    def __init__(self, folder: Path, seed: int, plan: Plan, now: float, killed: float | None, validated: bool) -> None:
        self.now, self._plan, self._killed, self._folder = now, plan, killed, folder
        self._random = random.Random(f"life {seed} {now}")
        self._left = self._random.randrange(1, 300)  # points until it is killed, once it is time
        self._engine_left = 0  # points until the engine dies; 0: it does not
        self._config = settings(folder, plan.rate(now), validated)
        self._server: Server | None = None
        self._written: dict[str, Any] = {"requests": 0, "engine_deaths": 0, "refusals": 0, "full": 0}

    # -- what goes wrong --------------------------------------------------------------------------------------------

    def point(self) -> None:
        """Be killed here, or kill the engine here, if it is time."""
        if self._killed is not None and self.now >= self._killed:
            self._left -= 1
            if self._left <= 0:
                self._write("killed", {})
                os.kill(os.getpid(), signal.SIGKILL)
        if self._engine_left:
            self._engine_left -= 1
            if not self._engine_left and self._server is not None:
                self._written["engine_deaths"] += 1
                self._server.engine.kill()

    def wrote(self, fd: int, data: bytes | memoryview) -> int:
        """Write to the drive, or half of it when the drive is full."""
        self.point()
        if self._plan.is_full(self.now):
            os.write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data)

    def stored(self, store: database.Database, statements: Sequence[database.Statement]) -> None:
        """Write to the database, or nothing when the drive is full."""
        self.point()
        if self._plan.is_full(self.now):
            raise files.StorageError("database or disk is full")
        STORE(store, statements)
        self.point()

    # -- its course -------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Serve until the day is over or the operator restarts the server."""
        server = self._server = Server(self._config, lambda: self.now, self.point)
        while server.learning.learner.newest_version == 0:
            try:
                await server.bring_up()
            except TandemError:  # it is started again until there is room on the drive
                await server.learning.close()
                self.now += 60.0
                server = self._server = Server(self._config, lambda: self.now, self.point)
        first: dict[str, float] | None = None
        while self.now < self._plan.hours * HOUR:
            before = self.now
            await self._request(server)
            if any(before < at <= self.now for at in self._plan.engine_kills):
                self._engine_left = self._random.randrange(1, 60)
            await self._revived(server)
            if int(before / HOUR) < int(self.now / HOUR):
                await self._revived(server)
                first = self._tell(server, first)
            if self._plan.restarts(before, self.now):
                break
        self._killed, self._engine_left = None, 0
        await self._revived(server)
        self._tell(server, first)
        with contextlib.suppress(files.StorageError):
            await server.learning.close()
        self._write("ended", {})

    async def _request(self, server: Server) -> None:
        traffic = self._plan.traffic(self.now)
        self.now += self._random.expovariate(1.0 / traffic.seconds)
        [kind] = self._random.choices(range(KINDS), traffic.weights)
        low, high = traffic.levels
        level = self._random.randrange(low, max(high, low + 1))
        self._written["requests"] += 1
        self._written["full"] += self._plan.is_full(self.now)
        try:
            serial = self._random.randrange(1 << 30)
            await server.ask(kind, level, serial, 1 if traffic.single else 8, self._random.getrandbits(40))
        except Exception as e:  # the client gets an error
            logging.getLogger(__name__).info("refused: %s", e)
            self._written["refusals"] += 1
        await settle(server, 40 if self._plan.is_full(self.now) else 4000)

    async def _revived(self, server: Server) -> None:
        """Start another engine where the last one has ended, and let the server do what is due."""
        await settle(server)
        while server.engine.state != "ready":
            server.engine.revive()
            with contextlib.suppress(TandemError):  # the learner tries again at its next use
                await server.bring_up()
            await settle(server)

    # -- what is seen of it -----------------------------------------------------------------------------------------

    def _tell(self, server: Server, first: dict[str, float] | None) -> dict[str, float]:
        """Write what there is at this moment; return the size of the process after its first hour."""
        counts = counted(server, self._folder / "checkpoints")
        size = sizes()
        ref = server.learning.current()
        assert ref is not None
        status = server.learning.learner.status()
        there = ref.digest in server.engine.memory or ref.digest in server.engine.known
        rate = self._config.rl_training.learning_rate
        assert rate != "auto"
        about = {
            # A version that went with its engine cannot be made again while the drive is full.
            "reward": server.engine.seen(ref).reward if there else None,
            "counts": counts,
            "grown": {name: size[name] / first[name] for name in size} if first is not None else {},
            "updates": status.updates,
            "rollbacks": status.rollbacks,
            "accepted": status.accepted,
            "compared": status.compared,
            "difference": status.difference,
            "stopped": "" if status.running else status.reason or "for no reason",
            "scale": status.learning_rate / rate,
        }
        self._write("hour", about)
        return first if first is not None else size

    def _write(self, what: str, about: dict[str, Any]) -> None:
        line = json.dumps({"what": what, "now": self.now} | self._written | about) + "\n"
        with open(self._folder / "seen.jsonl", "a", encoding="utf-8") as file:
            file.write(line)


async def settle(server: Server, turns: int = 4000) -> None:
    """Let the server do what is due; at most so many turns, as the loop tries again for ever while a drive is full."""
    learner = server.learning.learner
    for _ in range(turns):
        await asyncio.sleep(0)  # what was woken by a request that failed at once has its turn
        waits = learner._loop.task is None or not learner._loop.running or learner._loop._wake._waiters
        if server.engine.state != "ready" or (waits and not (learner._work or server.learning._tasks)):
            return
        await asyncio.sleep(0.0002 if learner._loop._wake._waiters else 0)


def counted(server: Server, folder: Path) -> dict[str, float]:
    """Return how much there is of everything that could grow."""
    learning, inner = server.learning, server.learning.learner
    ledger, judging, names = inner._learner.ledger, inner._learner.judging, server.models.registry
    there = sizes_of(folder)
    writer = ledger._writer
    return {
        "buffered": len(ledger.buffer),
        "ids": len(ledger.buffer.seen),
        "prompts recorded": len(inner._curriculum),
        "prompts waiting": len(judging.arms.waiting),
        "reports": len(inner.history),
        "versions": len(list(inner._learner.versions)),
        "names": len(names),
        "names' versions": sum(len(names.versions(entry.name)) for entry in names.entries()),
        "names remembered": max(len(names._folded), len(names._retired), len(learning._named)),
        "means": len(judging.live.means),
        "adapters in the engine": max(len(server.engine.memory), len(server.engine.known)),
        "checkpoints": sum(p.name == "manifest.json" for p in there),
        "files": len(there),
        "database bytes": sum(size for p, size in there.items() if p.name == database.NAME),
        "log bytes": sum(size for p, size in there.items() if p.name == f"{database.NAME}-wal"),
        "bytes not written": writer.waiting_bytes if writer is not None else 0,
        "manifest bytes": max((size for p, size in there.items() if p.name == "manifest.json"), default=0),
        "tasks": len(asyncio.all_tasks()),
        "descriptors": len(os.listdir("/dev/fd")),
    }


def sizes_of(folder: Path) -> dict[Path, int]:
    """Return the sizes of all files under a folder, which may come and go meanwhile."""
    found: dict[Path, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[Path(place) / name] = (Path(place) / name).stat().st_size
    return found


def sizes() -> dict[str, float]:
    """Return the size of this process: objects that refer to others, and the most memory so far in MiB."""
    gc.collect()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"objects": len(gc.get_objects()), "memory": most / (1 << 20 if sys.platform == "darwin" else 1 << 10)}


@contextlib.contextmanager
def small(life: Life) -> Iterator[None]:
    """Make the server's bounds smaller, let the loop wait for nothing, and let the drive be what the plan says."""
    with contextlib.ExitStack() as stack:
        for module, name in (
            (database, "BEHIND"),
            (registry, "REMEMBERED"),
            (trajectories, "SEEN_IDS"),
            (curriculum, "RECORDED"),
            (learner, "MOST_UPDATES"),
            (rows, "MOST_UPDATES"),
            (rows, "MOST_PAST"),
        ):
            stack.enter_context(patch.object(module, name, FEW[name]))
        stack.enter_context(patch.object(loop, "RETRY_SECONDS", 0.0))
        stack.enter_context(patch.object(loop, "POLL_SECONDS", 0.0))
        stack.enter_context(patch.object(files.DISK, "write", life.wrote))
        stack.enter_context(patch.object(database.Database, "write", lambda *given: life.stored(*given)))
        yield


def live(folder: Path, seed: int, hours: float, kills: int, now: float, kill: float, validated: bool) -> None:
    """Be one process. `kill` is when it is killed; 0: never."""
    logging.basicConfig(filename=folder / "errors.log", level=logging.ERROR)
    life = Life(folder, seed, Plan(seed, hours, kills), now, kill or None, validated)
    with small(life):
        asyncio.run(life.live())


def day(folder: Path, seed: int, hours: float, kills: int, validated: bool = False) -> Found:
    """Run the day, one process after the other, and return what was seen."""
    plan, found, now = Plan(seed, hours, kills), Found(start=Weights().reward), 0.0
    if validated:
        write_validation(folder / "validation.jsonl")
    due = list(plan.kills)
    seen = folder / "seen.jsonl"
    while now < hours * HOUR:
        due = [at for at in due if at > now]
        kill = due[0] if due else 0.0
        given: Sequence[object] = (folder, seed, hours, kills, now, kill, int(validated))
        seen.unlink(missing_ok=True)
        words = [sys.executable, "-m", "benchmarks.fast_forward", "--live", *map(str, given)]
        done = subprocess.run(words, cwd=ROOT, check=False)
        lines = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
        if not lines or lines[-1]["what"] == "hour" or done.returncode not in (0, -signal.SIGKILL):
            found.faults.append(f"a process ended with status {done.returncode} at {now / HOUR:.2f} hours")
            break
        now = max(lines[-1]["now"], now + 1.0)
        _take(found, lines)
    found.faults += judged(found, plan)
    return found


def _take(found: Found, lines: Sequence[dict[str, Any]]) -> None:
    """Add what one process has written."""
    found.lives += 1
    for name in ("requests", "engine_deaths", "refusals", "full"):
        setattr(found, name, getattr(found, name) + lines[-1][name])
    for line in lines:
        if line["what"] == "hour":
            found.see(line)
            for name in ("updates", "rollbacks", "scale"):
                setattr(found, name, line[name])
            if line["stopped"]:
                found.faults.append(f"learning had stopped at {line['now'] / HOUR:.2f} hours: {line['stopped']}")
    hours = [line for line in lines if line["what"] == "hour" and line["grown"]]
    for name, factor in hours[-1]["grown"].items() if hours else ():
        found.grown[name] = max(found.grown.get(name, 0.0), factor)


REFUSED = 10
"""Requests that may be refused for each engine that dies: on a busy machine several come before the next one is up."""


def judged(found: Found, plan: Plan) -> list[str]:
    """Return what should not have been."""
    faults = []
    end = found.rewards[-1] if found.rewards else 0.0
    if end < found.start - CHANCE:
        faults.append(f"the reward fell from {found.start:.3f} to {end:.3f}")
    for name, most in MOST.items():
        if found.most.get(name, 0) > most:
            faults.append(f"{name}: {found.most[name]}, and {most} is the most there may be")
    for name, factor in found.grown.items():
        if factor > GROWTH:
            faults.append(f"{name} grew by the factor {factor:.2f}")
    if found.refusals > found.full + REFUSED * found.engine_deaths:
        faults.append(f"{found.refusals} requests were refused")
    if found.lives < len(plan.kills) / 2:
        faults.append("it was not killed as often as planned")
    return faults


def _live(folder: str, seed: str, hours: str, kills: str, now: str, kill: str, validated: str) -> None:
    """Be the process that `day` has started with these words."""
    live(Path(folder), int(seed), float(hours), int(kills), float(now), float(kill), validated == "1")


def main() -> None:
    """Run days, and write what they have shown."""
    if sys.argv[1:2] == ["--live"]:
        _live(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--kills", type=int, default=12, help="of the server; the engine dies twice as often")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    runs = []
    for seed in range(args.seeds):
        for validated in (False, True):
            with tempfile.TemporaryDirectory(prefix="tandem-day-") as folder:
                found = day(Path(folder), seed, args.hours, args.kills, validated)
            runs.append({"seed": seed, "validation prompts": validated} | asdict(found))
            print(json.dumps(runs[-1]), flush=True)
            if args.json_out:
                command = " ".join(["-m benchmarks.fast_forward", *sys.argv[1:]])
                about = (
                    describe()
                    | {"command": command}
                    | {"hours": args.hours, "kills": args.kills, "most": MOST, "growth": GROWTH}
                )
                write_json(args.json_out, about | {"runs": runs})
    if any(run["faults"] for run in runs):
        sys.exit("; ".join(fault for run in runs for fault in run["faults"]))


if __name__ == "__main__":
    main()

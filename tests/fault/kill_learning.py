"""A server whose adapters learn is killed again and again; what they have learned in the end is what they learn
undisturbed.

python -m tests.fault.kill_learning --kills 200 --json-out benchmarks/results/kill_learning.json

Three adapters learn at the same time. To two of them a client outside the server posts updates of a fixed course, each
with trajectories of its own ids, until the server has acknowledged it; to the third it posts feedback, which the server
learns from by itself. `kill -9` comes at random moments of start, update, publish and checkpoint, to the whole server,
to its engine, to its front, or in the middle of a drain. While it is dead every checkpoint must be whole. Once it is
back every version that it lists must have the content that this number has in the undisturbed run, the last version
that was acknowledged must be among them, all feedback that was acknowledged must be there, and the updates done must be
those that were sent, each once. At the end of a course the trainers' files must be those of the undisturbed run, byte
for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from mlx_tandem.cli.bench import machine
from mlx_tandem.cli.outputs import write_json
from mlx_tandem.files import StorageError
from mlx_tandem.server.sockets import unused_port
from mlx_tandem.training.store import manifests
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.database import NAME, Database

ROOT = Path(__file__).parents[2]
INTERVAL = 4  # updates from one checkpoint to the next
READY_SECONDS = 300.0
KINDS = ("server", "engine", "front", "drain")
SETTLE_SECONDS = 10.0
DEFAULT, OPINIONATED = "policy", "minded"
LEARNERS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "coder": {"algorithm": "dr_grpo", "loss_tokens": 8, "lora_rank": 1},
    OPINIONATED: {},
}
"""The adapters that learn, with their own settings. `OPINIONATED` learns from feedback alone."""

EVENTS = ("began", "published", "checkpoint begins", "checkpoint there", "state begins", "old goes")


PREFIXES = {
    "checkpoint begins": ".new-",
    "checkpoint there": "checkpoint-",
    "state begins": ".state-",
    "old goes": ".old-",
}
"""What the names of the folders begin with that show an event."""


class Wrong(AssertionError):
    """The server has broken a promise."""


def settings(folder: Path) -> dict[str, Any]:
    """As little work as possible to one update."""
    return {
        "model": {"max_model_len": 256},
        "cache": {"num_blocks": 65},
        "scheduler": {"max_num_seqs": 4},
        "lora": {"max_loras": 4, "max_lora_rank": 16},
        "engine": {"heartbeat_seconds": 0.1},
        "rl_training": {
            "enabled": True,
            "lora_rank": 2,
            "lora_alpha": 4.0,
            "lora_target_modules": ["q_proj"],
            "learning_rate": 1e-3,
            "update_frequency": 1000,
            "guard_prompts": 0,
            "adapters": LEARNERS,
        },
        "feedback": {"learn": OPINIONATED, "batch_size": 1, "epochs": 1, "replay": 0.0},
        "checkpointing": {"checkpoint_dir": str(folder), "interval": INTERVAL, "keep_n_checkpoints": 2},
    }


def lesson(learner: str, number: int) -> list[dict[str, Any]]:
    """Trajectories of a learner's update `number`, from 0 on: always the same."""
    g = random.Random(f"{learner}/{number}")
    return [
        {
            "id": f"{number}.{i}",
            "group": f"{number}",
            "prompt_token_ids": [5, 6, 7],
            "token_ids": [g.randrange(30, 200) for _ in range(g.randint(2, 6))],
            "reward": g.random(),
        }
        for i in range(3)
    ]


def opinion(number: int) -> dict[str, Any]:
    """Feedback `number`, from 0 on: what to answer to a question. Always the same."""
    digits = random.Random(number).sample("123456789", 4)
    return {
        "object": "chat.completion",
        "id": f"opinion-{number}",
        "created": 1 + number,
        "model": OPINIONATED,
        "messages": [{"role": "user", "content": f"Sort down: {' '.join(digits)}"}],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": " ".join(sorted(digits, reverse=True))}}],
    }


def place(folder: Path, learner: str) -> Path:
    """Where the checkpoints and states of a learner are."""
    return folder if learner == DEFAULT else folder / learner


class Server:
    """One life of a server on `folder`, as `tandem serve` starts it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.began = time.monotonic()
        config = folder.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(settings(folder)), encoding="utf-8")
        self.log = folder.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlx_tandem", "serve", "--config", str(config), "--port", str(port)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=READY_SECONDS)

    def children(self) -> list[int]:
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid, parent in map(str.split, listed.splitlines()) if int(parent) == self.process.pid]

    def wait_ready(self) -> None:
        """Raises httpx.TransportError when it has been killed before."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.ConnectError):
                if self.client.get("/health").status_code == 200:
                    return
            if self.process.poll() is not None:
                raise httpx.ConnectError("it has ended")
            time.sleep(0.05)
        raise Wrong(f"not ready after {READY_SECONDS:g} s")

    def kill(self, kind: str, rng: random.Random) -> None:
        children = self.children()
        if kind == "drain":
            self.process.send_signal(signal.SIGTERM)
            time.sleep(rng.uniform(0.0, 0.4))
        if kind != "engine":
            self.process.kill()
        if kind != "front":
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if kind != "engine":
            self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(READY_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("server", random.Random(0))
            raise Wrong("it does not end") from None

    def complain(self) -> None:
        print(self.log.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)

    def status(self, learner: str) -> dict[str, Any]:
        reply = self.client.get("/v1/training/status", params={"adapter": learner})
        found: dict[str, Any] = reply.raise_for_status().json()
        return found

    def opinions(self) -> list[str]:
        """Of which completions there is feedback."""
        listed = self.client.get("/v1/feedback", params={"limit": 100, "order": "asc"}).raise_for_status().json()
        return [each["completion_id"] for each in listed["data"]]

    def digest(self, learner: str, number: int) -> str | None:
        """Of a version; None when it is gone. Raises HTTPStatusError while it is being made again."""
        reply = self.client.get(f"/v1/adapters/{learner}@{number}")
        return None if reply.status_code == 404 else str(reply.raise_for_status().json()["digest"])

    def answers(self, model: str) -> bool:
        """False: it is gone."""
        reply = self.client.post("/v1/completions", json={"model": model, "prompt": [5, 6], "max_tokens": 1})
        if reply.status_code == 404 or (reply.is_error and reply.json()["error"]["code"] == "adapter_changed"):
            return False
        reply.raise_for_status()
        return True


class Track:
    """The course of one learner. `known`: digests by number, of the undisturbed run, which `learns` them."""

    def __init__(self, learner: str, known: dict[int, str], learns: bool) -> None:
        self.learner, self.known, self.learns = learner, known, learns
        self.acknowledged = 0  # updates, or feedback of which each piece is an update
        self.recomputed = 0

    def post(self, server: Server) -> None:
        """Post what comes next until it is acknowledged."""
        number = self.acknowledged
        if self.learner == OPINIONATED:
            found = server.client.post("/v1/feedback/import", json=[opinion(number)]).raise_for_status().json()
            if found["stored"] != 1:
                raise Wrong(f"feedback {number}: {found}")
            if self.learns:
                self.wait(server, number + 1)
                self.see(number + 2, server.digest(self.learner, number + 2))
        else:
            body = {"trajectories": lesson(self.learner, number), "wait": True}
            reply = server.client.post("/v1/training/update", params={"adapter": self.learner}, json=body)
            report = reply.raise_for_status().json()["report"]
            if report["outcome"] == "published":
                self.see(number + 2, server.digest(self.learner, number + 2))
            elif report["outcome"] != "skipped" or report["trajectories"]:
                raise Wrong(f"{self.learner}, update {number}: {report}")
        self.acknowledged += 1

    def wait(self, server: Server, updates: int) -> None:
        """Wait until so many updates are done."""
        deadline = time.monotonic() + READY_SECONDS
        while (status := server.status(self.learner))["updates"] < updates:
            if time.monotonic() > deadline:
                raise Wrong(f"{self.learner} does not learn: {status}")
            time.sleep(0.02)

    def see(self, number: int, digest: str | None) -> None:
        """A version of this number has this content."""
        if self.learns and digest is not None:
            self.known[number] = digest
        if digest != self.known.get(number):
            known = self.known.get(number)
            raise Wrong(f"version {number} of {self.learner} is {digest}, undisturbed {known}")

    def check(self, server: Server) -> None:
        """What holds once a server is ready, and what once it has caught up with itself."""
        began, done = time.monotonic(), self.acknowledged
        with contextlib.suppress(httpx.HTTPStatusError):  # some may be made again at this moment
            self.check_versions(server)
        while (status := server.status(self.learner)).get("recovering"):
            self.recomputed = max(self.recomputed, status["recovering"])
            if time.monotonic() - began > READY_SECONDS:
                raise Wrong(f"{self.learner} does not recover: {status}")
            time.sleep(0.05)
        if self.learner == OPINIONATED:
            self.check_opinions(server, done)
        elif status["updates"] not in (done, done + 1):
            raise Wrong(f"{done} updates of {self.learner} were acknowledged; it has {status}")
        while not status["step"] == status["updates"] == status["version"] - 1:
            # Of one that learns by itself the numbers may be those of two moments.
            if self.learner != OPINIONATED or time.monotonic() - began > READY_SECONDS:
                raise Wrong(f"the numbers of {self.learner} do not fit together: {status}")
            status = server.status(self.learner)
        self.check_versions(server)
        began = time.monotonic()
        while missing := self.missing(server, server.status(self.learner)):
            # A checkpoint goes a moment before the status says so.
            if time.monotonic() - began > SETTLE_SECONDS:
                raise Wrong(f"{missing} is gone, or another: {server.status(self.learner)}")
            time.sleep(0.05)

    def check_opinions(self, server: Server, done: int) -> None:
        """All feedback that was acknowledged is there, each piece once; no update has learned from more."""
        kept = server.opinions()
        if kept not in [[opinion(i)["id"] for i in range(count)] for count in (done, done + 1)]:
            raise Wrong(f"{done} pieces of feedback were acknowledged; there are {kept}")
        if (updates := server.status(self.learner)["updates"]) > len(kept):
            raise Wrong(f"{updates} updates learned from {len(kept)} pieces of feedback")

    def missing(self, server: Server, status: dict[str, Any]) -> str:
        """The first of what must be there that is not; empty: it is all there."""
        prefix = "" if self.learner == DEFAULT else f"{self.learner}."
        checkpoints = [name for name in status["available_checkpoints"] if name.startswith("checkpoint-")]
        saved = [int(name.removeprefix("checkpoint-").partition(".")[0]) + 1 for name in checkpoints]
        # Other versions end with the process that has them, unless a state has them, and so does the last one of a
        # learner that goes on by itself.
        last = [] if self.learner == OPINIONATED else [status["version"]]
        for number in [*saved, *last]:
            name = f"{self.learner}@{number}"
            if not server.answers(name) or server.digest(self.learner, number) != self.known[number]:
                return name
        return next((name for name in checkpoints if not server.answers(prefix + name)), "")

    def check_versions(self, server: Server) -> None:
        """Every version that is listed is what it was, and answers."""
        listed = server.client.get("/v1/adapters").raise_for_status().json()["adapters"]
        for number in next(a["versions"] for a in listed if a["name"] == self.learner):
            digest = server.digest(self.learner, number)
            if digest is None:
                continue  # a version of now may just have gone
            if number == 1 and self.learns:
                self.known[1] = digest
            self.see(number, digest)
            server.answers(f"{self.learner}@{number}")

    def finish(self, server: Server, folder: Path) -> dict[str, str]:
        """Hashes of the trainer's files after the last update."""
        name = "the-end"
        deadline = time.monotonic() + READY_SECONDS
        while True:
            server.wait_ready()  # its engine may have been killed last
            try:
                self.wait(server, self.acknowledged)
                body = {"name": name}
                reply = server.client.post("/v1/training/checkpoint", params={"adapter": self.learner}, json=body)
                if reply.status_code != 409:  # there is one: of a server that was killed before it could say so
                    reply.raise_for_status()
                break
            except httpx.HTTPStatusError as e:
                if e.response.status_code not in (500, 503) or time.monotonic() > deadline:
                    raise Wrong(e.response.text) from e
        files = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "trainer.json")
        found = {file: (place(folder, self.learner) / name / file).read_bytes() for file in files}
        return {f"{self.learner}/{file}": hashlib.sha256(content).hexdigest() for file, content in found.items()}


Known = dict[str, dict[int, str]]
"""Digests by learner and number."""


class Course:
    """All updates of one course, whatever becomes of the servers that do them. `known`: digests of the undisturbed run,
    which is the one that has none."""

    def __init__(self, folder: Path, updates: int, known: Known | None = None) -> None:
        self.folder, self.updates = folder, updates
        self.tracks = [Track(n, {} if known is None else known[n], known is None) for n in LEARNERS]
        self.restarts = 0
        self.ready_s: list[float] = []
        self.recovered_s: list[float] = []
        self.hit: Counter[str] = Counter()
        self.failure: Exception | None = None

    @property
    def known(self) -> Known:
        return {track.learner: track.known for track in self.tracks}

    @property
    def progress(self) -> list[int]:
        """What was acknowledged, by learner."""
        return [track.acknowledged for track in self.tracks]

    @property
    def done(self) -> bool:
        return all(count == self.updates for count in self.progress)

    @property
    def start_s(self) -> float:
        """From the start of a server until it is ready, about."""
        return self.ready_s[-1] if self.ready_s else 3.0

    def drive(self, server: Server) -> None:
        """Post what is left until all is acknowledged or the server has ended. Runs beside whoever kills."""
        try:
            up = -1
            while up < 0 or not self.done:
                try:
                    server.wait_ready()
                    restarts = server.client.get("/health").json()["engine_restarts"]
                    if restarts != up:
                        self.ready_s += [time.monotonic() - server.began] if up < 0 else []
                        self.check(server)
                        up = restarts
                    self.post(server)
                except httpx.HTTPStatusError as e:
                    if e.response.status_code not in (500, 503):
                        raise Wrong(e.response.text) from e
        except httpx.TransportError:
            pass  # killed
        except Exception as e:
            self.failure = e

    def post(self, server: Server) -> None:
        """Post the next update of each learner, and the next feedback, at the same time."""
        left = [track for track in self.tracks if track.acknowledged < self.updates]
        with ThreadPoolExecutor(len(self.tracks)) as threads:
            work = [threads.submit(track.post, server) for track in left]
        failures = [e for each in work if (e := each.exception()) is not None]
        for e in sorted(failures, key=lambda e: not isinstance(e, Wrong)):
            raise e

    def check(self, server: Server) -> None:
        """What holds of each learner once a server is ready."""
        began = time.monotonic()
        for track in self.tracks:
            track.check(server)
        self.restarts += 1
        self.recovered_s.append(time.monotonic() - began)

    def look(self) -> None:
        """At the folder of a server that is dead: what lies there under a name is whole."""
        if not self.folder.exists():
            self.hit["before anything"] += 1
            return
        under_way = False
        for folder in [place(self.folder, learner) for learner in LEARNERS]:
            names = {p.name for p in folder.iterdir()} - LEARNERS.keys() if folder.exists() else set()
            checkpoints = Checkpoints(folder, 1)
            for name in sorted(names - {".lock"}):
                if name.startswith((".new-", ".old-", ".state-", NAME)):
                    continue
                try:
                    checkpoints.verify(name)
                    manifests.read(folder / name)
                except Exception as e:
                    raise Wrong(f"{folder / name} is torn: {e}") from e
            under_way |= any(name.startswith((".new-", ".old-")) for name in names)
        self.hit["checkpoint under way" if under_way else _found(self.folder)] += 1

    def finish(self, server: Server) -> dict[str, str]:
        """Hashes of all trainers' files after the last update."""
        return {name: digest for track in self.tracks for name, digest in track.finish(server, self.folder).items()}


def _found(folder: Path) -> str:
    """What was under way, by a copy of the database: reading would bring what the kill has left in order."""
    with tempfile.TemporaryDirectory() as copy:
        for path in folder.glob(f"{NAME}*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, copy)
        if not (Path(copy) / NAME).exists():
            return "before anything"
        try:
            database = Database.open(Path(copy))
            begun = database.rows("SELECT count(*) FROM updates WHERE outcome IS NULL")[0][0]
            states = {folder for (folder,) in database.rows("SELECT folder FROM states")}
            database.close()
        except StorageError as e:
            raise Wrong(f"the database is torn: {e}") from e
    if {p.name for p in folder.rglob(".state-*")} != states:
        return "state under way"
    return "update under way" if begun else "between updates, or start"


class Killer:
    """When and how servers are killed. `plan`: (how, when) of all kills; without one it is drawn."""

    def __init__(self, kills: int, seed: int, plan: Sequence[tuple[str, str]] = (), seconds: float = math.inf) -> None:
        self.rng = random.Random(seed)
        self.plan = list(plan) or [self._draw() for _ in range(kills)]
        self.kills: list[tuple[str, str]] = []  # done
        self.until = time.monotonic() + seconds

    def _draw(self) -> tuple[str, str]:
        (kind,) = self.rng.choices(KINDS, (5, 3, 1, 1))
        (moment,) = self.rng.choices(("start", "any", "event"), (2, 2, 5))
        return kind, self.rng.choice(EVENTS) if moment == "event" else moment

    @property
    def done(self) -> bool:
        return len(self.kills) == len(self.plan) or time.monotonic() > self.until

    def strike(self, server: Server, driver: threading.Thread, start_s: float, spare_engine: bool) -> str:
        """Kill once; how. Nothing when `driver` ends first. A server takes about `start_s` to be ready."""
        kind, moment = self.plan[len(self.kills)]
        kind = "server" if spare_engine and kind == "engine" else kind
        if any(not driver.is_alive() for _ in self._wait(server, moment, start_s)) or not driver.is_alive():
            return ""
        server.kill(kind, self.rng)
        self.kills.append((kind, moment))
        return kind

    def _wait(self, server: Server, moment: str, start_s: float) -> Iterator[None]:
        if moment == "start":
            yield from _pause(self.rng.uniform(0.0, start_s))
            return
        with contextlib.suppress(httpx.TransportError):
            server.wait_ready()
        if moment == "any":
            yield from _pause(self.rng.uniform(0.0, 0.5 * start_s))
            return
        for _ in range(self.rng.randint(1, 2)):
            before, deadline = _traces(server, moment), time.monotonic() + max(2.0, start_s)
            while not _traces(server, moment) - before and time.monotonic() < deadline:
                time.sleep(0.0005)
                yield
        time.sleep(self.rng.choice((0.0, self.rng.uniform(0.0, 0.004), self.rng.uniform(0.0, 0.03))))


def _pause(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.02))
        yield


def _traces(server: Server, event: str) -> set[str]:
    folder = server.folder
    with contextlib.suppress(OSError):
        if event == "published":
            return {str(i) for i in range(server.log.read_bytes().count(b"adapter published"))}
        if event == "began":
            log = (folder / f"{NAME}-wal").stat()
            return {f"{log.st_size}:{log.st_mtime_ns}"}
        paths = [path for learner in LEARNERS for path in place(folder, learner).glob("*")]
        return {str(path) for path in paths if path.name.startswith(PREFIXES[event])}
    return set()


def undisturbed(folder: Path, updates: int, port: int) -> tuple[Known, dict[str, str]]:
    """Digests of the versions, and hashes at the end."""
    course = Course(folder, updates)
    server = Server(folder, port)
    try:
        course.drive(server)
        if course.failure is not None:
            raise course.failure
        return course.known, course.finish(server)
    except BaseException:
        server.complain()
        raise
    finally:
        server.end()
        server.client.close()


def disturbed(course: Course, killer: Killer, port: int) -> dict[str, str]:
    """The hashes after a course in which a server is killed until all is done, or the killer."""
    while True:
        server = Server(course.folder, port)
        driver = threading.Thread(target=course.drive, args=(server,))
        driver.start()
        engine_killed_at: list[int] = []
        kind = ""
        try:
            while not killer.done:
                spare = engine_killed_at == course.progress  # an update that ends engine after engine is given up
                kind = killer.strike(server, driver, course.start_s, spare)
                if kind != "engine":
                    break
                engine_killed_at, kind = course.progress, ""
            driver.join()
            if course.failure is not None:
                raise course.failure
            if not kind:
                if not course.done:
                    raise Wrong(f"the server ended by itself, exit status {server.process.poll()}")
                return course.finish(server)
            course.look()
            print(f"{course.folder}: kill {len(killer.kills)}, {kind}", file=sys.stderr, flush=True)
        except BaseException as e:
            server.complain()
            print(f"{course.folder}: {e!r}", file=sys.stderr, flush=True)
            raise
        finally:
            if server.process.poll() is None:
                server.end()
            driver.join()
            server.client.close()


def courses(folder: Path, killer: Killer, updates: int, known: Known, end: dict[str, str]) -> list[Course]:
    """As many as the killer takes. Raises Wrong."""
    made: list[Course] = []
    port = unused_port()
    while not killer.done:
        made.append(Course(folder / f"course-{len(made)}", updates, known))
        if disturbed(made[-1], killer, port) != end:
            raise Wrong(f"{made[-1].folder} ends in other weights")
        print(f"{folder.name}: {len(killer.kills)} kills, {len(made)} courses", file=sys.stderr, flush=True)
    return made


def run(folder: Path, killers: Sequence[Killer], updates: int) -> dict[str, Any]:
    """Courses of `updates` each, those of each killer beside those of the others. Raises Wrong."""
    known, end = undisturbed(folder / "undisturbed", updates, unused_port())
    places = [folder / f"killer-{i}" for i in range(len(killers))]
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(len(killers)) as threads:
        runs = [threads.submit(courses, *pair, updates, known, end) for pair in zip(places, killers, strict=True)]
        done = [course for each in runs for course in each.result()]
    ready = sorted(s for c in done for s in c.ready_s)
    kills = [kill for killer in killers for kill in killer.kills]
    return {
        "kills": len(kills),
        "how": dict(Counter(kind for kind, _ in kills)),
        "when": dict(Counter(moment for _, moment in kills)),
        "found_after_kill": dict(sum((c.hit for c in done), Counter())),
        "restarts": sum(c.restarts for c in done),
        "courses": len(done),
        "learners": list(LEARNERS),
        "updates": updates * len(done) * len(LEARNERS),
        "of_feedback": updates * len(done),
        "torn": 0,  # or Wrong would have been raised, here as for the next two
        "twice": 0,
        "equal": True,
        "digest": {name: end[f"{name}/adapter_model.safetensors"] for name in LEARNERS},
        "most_updates_recomputed": max(track.recomputed for c in done for track in c.tracks),
        "ready_s": {"median": round(ready[len(ready) // 2], 2), "max": round(ready[-1], 2)} if ready else {},
        "recovered_s_max": round(max((s for c in done for s in c.recovered_s), default=0.0), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="kill -9 while learning")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--updates", type=int, default=24, help="of one course")
    parser.add_argument("--jobs", type=int, default=1, help="so many servers beside each other")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no more kills are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    shares = [args.kills // args.jobs + (i < args.kills % args.jobs) for i in range(args.jobs)]
    killers = [Killer(kills, 1000 * args.seed + i, seconds=60 * args.minutes) for i, kills in enumerate(shares)]
    with tempfile.TemporaryDirectory(prefix="tandem-kill-") as folder:
        result = run(Path(folder), killers, args.updates)
    result["seconds"] = round(time.monotonic() - began)
    print(json.dumps(result, indent=1))
    if args.json_out:
        about = {"seed": args.seed, "jobs": args.jobs, "interval": INTERVAL, "updates_of_a_course": args.updates}
        write_json(args.json_out, about | result | machine.describe())


if __name__ == "__main__":
    main()

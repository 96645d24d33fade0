"""An environment that is played for learning: starts its program, asks for rounds when learning has room, keeps what
comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.log import log, log_exception
from mlx_tandem.training.atropos.scored import ScoredData, trajectories
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.training.verifiers import player
from mlx_tandem.training.verifiers.variables import chosen
from mlx_tandem.types import AdapterRef

POLL_SECONDS = 0.2
"""Seconds between two looks at whether learning has room."""

PAUSES = (1.0, 60.0)
"""Seconds between the end of the program and its next start: the first pause and the longest one. Each is twice as
long as the one before."""

MOST_BYTES = 256 << 20
"""Most bytes of the answers to one task."""

END_SECONDS = 5.0
"""Seconds within which the program has to end after its input has ended."""

FIRST_VERSION = (0, 4)
"""The first version of verifiers whose environments can be played."""

State = Literal["starting", "playing", "learning", "stopped", "failed"]


class Status(Struct):
    """Counts of the environment since the server's start, with what it does now."""

    environment: str
    state: State = "starting"  # learning: there is enough to learn from; stopped: with learning; failed: it waits
    verifiers: str = ""  # the version
    rounds: int = 0
    episodes: int = 0
    failed_episodes: int = 0  # of these
    trajectories: int = 0
    refused_groups: int = 0
    reward: float | None = None  # the mean of the last round
    error: str = ""  # the last one; empty since a round went well


class Line(Struct):
    """A line of the program: that it is ready, with its version; a group; or the end of a round, with its episodes."""

    ready: str = ""
    group: ScoredData | None = None
    played: int = 0
    failed: int = 0  # of the episodes
    error: str = ""


class Ended(Exception):
    """The program has ended, or has said something that cannot be understood."""


def check(config: Config) -> None:
    """Check that the environment of the settings can be played from this machine. Raises InvalidRequest."""
    environment, python = config.rl_training.verifiers, config.rl_training.verifiers_python or sys.executable
    if config.server.uds or config.server.ssl_certfile:
        raise InvalidRequest(
            "'rl_training.verifiers' needs a server at an http:// address: it goes with neither 'server.uds' nor "
            "'server.ssl_certfile'"
        )
    if environment.endswith(".toml") and not Path(environment).is_file():
        raise InvalidRequest(f"'rl_training.verifiers' is '{environment}', but there is no such file")
    question = "import importlib.metadata as m; print(m.version('verifiers'))"
    try:
        variables = chosen(config.rl_training)
        said = subprocess.run([python, "-P", "-c", question], env=variables, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as e:
        raise InvalidRequest(f"'rl_training.verifiers_python' is '{python}', which cannot be run: {e}") from e
    version = said.stdout.strip()
    if said.returncode or tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < FIRST_VERSION:
        there = f"has verifiers {version}" if version else "has no verifiers"
        raise InvalidRequest(
            f"{python} {there}, which 'rl_training.verifiers' needs: install it with \"{python} -m pip install "
            "'verifiers>=0.4'\", or name the Python of a virtual environment that has it with --environment-python"
        )


class Environment:
    """The program that plays the environment of the settings. `run` returns only when it is cancelled."""

    def __init__(
        self,
        config: Config,
        engine: EngineClient,
        learner: OnlineLearner,
        current: Callable[[], AdapterRef | None],
        clock: Callable[[], float],
    ):
        """Prepare to play. `current` returns the version that is served, and `clock` the time in Unix seconds."""
        self._config, self._engine, self._learner = config, engine, learner
        self._current, self._clock = current, clock
        self.status = Status(config.rl_training.verifiers)
        self._said = ""  # the last line of the program's standard error

    async def run(self, url: str) -> None:
        """Play against the server at `url` for as long as it runs, and start the program again when it has ended."""
        least, most = PAUSES
        pause = least
        while True:
            rounds = self.status.rounds
            try:
                await self._play(url)
            except Ended as e:
                self._fail("the program of the environment has ended", str(e))
            except Exception as e:
                log_exception("playing the environment failed", e)
                self.status.error = f"internal error: {type(e).__name__}"
            self.status.state = "failed"
            pause = least if self.status.rounds > rounds else min(2 * pause, most)
            await asyncio.sleep(pause)

    async def _play(self, url: str) -> None:
        """Start the program, and ask for rounds until it ends. Raises Ended."""
        training, key = self._config.rl_training, self._config.server.api_key
        self.status.state = "starting"
        process = await asyncio.create_subprocess_exec(
            training.verifiers_python or sys.executable,
            "-P",
            player.__file__,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=chosen(training) | ({player.KEY: key} if key else {}),
            limit=MOST_BYTES,
            start_new_session=True,
        )
        hearing = asyncio.create_task(self._hear(process))
        try:
            settings = {
                "environment": training.verifiers,
                "url": url,
                "tokenizer": str(Path(self._config.engine.model.path).resolve()),
                "rollouts": training.group_size if training.group_size > 1 else max(training.siblings, 2),
            }
            await self._tell(process, settings)
            self.status.verifiers = (await self._answer(process)).ready
            while True:
                await self._turn(process)
        except Ended as e:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hearing, END_SECONDS)
            raise Ended(f"{e}; it said last: {self._said}" if self._said else str(e)) from e
        finally:
            await _end(process)
            hearing.cancel()

    async def _turn(self, process: asyncio.subprocess.Process) -> None:
        """Play one round if learning lacks something, else wait a little. Raises Ended."""
        lacking, ref = self._learner.lacking(), self._current()
        if lacking is None or lacking <= 0 or ref is None or self._engine.info is None:
            self.status.state = "stopped" if lacking is None else "learning" if lacking <= 0 else "starting"
            await asyncio.sleep(POLL_SECONDS)
            return
        self.status.state = "playing"
        await self._tell(process, {"model": ref.label, "episodes": lacking})
        rewards: list[float] = []
        while (found := await self._answer(process)).group is not None:
            rewards += found.group.scores
            await self._take(found.group, ref)
        self.status.rounds += 1
        self.status.episodes += found.played
        self.status.failed_episodes += found.failed
        self.status.reward = sum(rewards) / len(rewards) if rewards else None
        if found.failed:
            self._fail("episodes of the environment have failed", found.error)
        else:
            self.status.error = ""
        if not rewards:
            await asyncio.sleep(PAUSES[0])  # all episodes have failed, as they do while an engine starts again

    async def _take(self, group: ScoredData, ref: AdapterRef) -> None:
        """Keep a group that this version has made, or count it as refused; wait while nothing can be kept."""
        while True:
            try:
                info = self._engine.check_ready()
                made = trajectories(
                    group,
                    source="verifiers",
                    version=ref.version,
                    created=self._clock(),
                    vocab_size=info.vocab_size,
                    most_tokens=info.max_model_len,
                )
                await self._learner.add(made, len(made))
            except InvalidRequest as e:
                self.status.refused_groups += 1
                self._fail("a group of the environment is not learned from", e.message)
                return
            except TandemError as e:  # The engine is not there, or the drive takes nothing.
                self._fail("a group of the environment waits", e.message)
                await asyncio.sleep(PAUSES[0])
                continue
            self.status.trajectories += len(made)
            return

    async def _tell(self, process: asyncio.subprocess.Process, value: object) -> None:
        """Send a line to the program. Raises Ended."""
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(value) + b"\n")
        try:
            await process.stdin.drain()
        except OSError as e:
            raise Ended(f"it ended with the status {await process.wait()}") from e

    async def _answer(self, process: asyncio.subprocess.Process) -> Line:
        """Return the next line from the program. Raises Ended."""
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
        except ValueError as e:
            raise Ended(f"it said over {MOST_BYTES} bytes about one task") from e
        if not line:
            raise Ended(f"it ended with the status {await process.wait()}")
        try:
            return msgspec.json.decode(line, type=Line)
        except (msgspec.DecodeError, RecursionError) as e:
            raise Ended(f"it said something that cannot be understood: {e}") from e

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        """Log the program's standard error line by line, and remember the last one."""
        assert process.stderr is not None
        self._said = ""
        with contextlib.suppress(ValueError):  # a line without an end
            while line := await process.stderr.readline():
                if said := line.decode(errors="replace").strip()[:500]:
                    self._said = said
                    log("environment", logging.DEBUG, said=said)

    def _fail(self, event: str, error: str) -> None:
        """Record an error, which is logged once."""
        if error != self.status.error:
            log(event, logging.WARNING, environment=self.status.environment, error=error)
        self.status.error = error

    def describe(self) -> dict[str, object]:
        """Return the status for clients."""
        return structs.asdict(self.status)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program and all that it has started: it may clean up first."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()

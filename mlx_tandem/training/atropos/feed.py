"""The feed: it takes batches from Atropos when learning has room for them, for as long as the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from msgspec import Struct, structs

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.log import log, log_exception
from mlx_tandem.training.atropos.client import Client, NotRegistered, Unreachable
from mlx_tandem.training.atropos.hub import OwnTrainer
from mlx_tandem.training.atropos.scored import ScoredData, trajectories
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.types import EngineInfo

POLL_SECONDS = 1.0
"""Seconds between two requests for a batch."""

PATIENCE = 60
"""Requests without a batch after which the log says what the reason may be."""

MANY_STEPS = 1_000_000_000
"""The number of updates that environments are told. They end when it is reached, but learning does not."""

State = Literal["connecting", "waiting", "learning", "stopped"]


class FeedStatus(Struct):
    """Counts of the feed since the server's start, with what it does now."""

    url: str  # of the API; empty: this server is it
    state: State = "connecting"  # waiting: for a batch; learning: there is enough to learn from; stopped: with learning
    batch_size: int = 0  # sequences; 0: not registered yet
    batches: int = 0
    trajectories: int = 0
    without_logprobs: int = 0  # of these, those whose environment gave no logprobs
    refused_groups: int = 0
    error: str = ""  # the last one; empty since it was overcome


def batch_size(update_frequency: int) -> int:
    """Return how many sequences a batch has, about as many as an update.

    Batches are whole groups, whose sizes have to divide the size of a batch. Atropos' groups are powers of two.
    """
    if update_frequency >= 32:
        return update_frequency - update_frequency % 32
    return 1 << (update_frequency.bit_length() - 1)


class Feed:
    """One trainer of an Atropos API. `run` returns only when it is cancelled."""

    def __init__(
        self,
        config: Config,
        engine: EngineClient,
        learner: OnlineLearner,
        source: Client | OwnTrainer,
        clock: Callable[[], float],
    ):
        """Prepare to ask `source` for batches. `clock` returns the time in Unix seconds."""
        self._config, self._engine, self._learner, self._clock = config, engine, learner, clock
        self._source = source
        self.status = FeedStatus(config.rl_training.atropos_url.rstrip("/"))
        self._registered = False
        self._looks = 0
        self._left: list[ScoredData] = []  # groups of the last batch that are not kept yet

    async def run(self) -> None:
        """Ask for batches whenever something is lacking for an update, and keep what comes."""
        while True:
            again = False
            try:
                again = await self._turn()
                self.status.error = ""
            except NotRegistered:
                self._registered = False
            except Unreachable as e:
                self.status.state = "connecting"
                self._fail("Atropos does not answer", str(e))
            except (
                TandemError
            ) as e:  # The engine is not there, or the drive takes nothing: the batch is kept until then.
                self._fail("a batch of Atropos waits", e.message)
            except Exception as e:
                log_exception("taking from Atropos failed", e)
                self.status.error = f"internal error: {type(e).__name__}"
                del self._left[:1]  # the others may be in order
            if not again:
                await asyncio.sleep(POLL_SECONDS)

    async def _turn(self) -> bool:
        """Do what is due; return whether to look again at once."""
        lacking = self._learner.lacking()
        if lacking is None or lacking <= 0:
            self.status.state = "stopped" if lacking is None else "learning"
            return False
        info = self._engine.check_ready()
        if not self._registered:
            self.status.state = "connecting"
            await self._register(info)
        if not self._left:
            self._left = list(await self._source.batch() or [])
            self.status.state = "waiting"
            self._count()
        while self._left:
            await self._take(self._left[0], info)
            del self._left[0]
        return self._looks == 0

    async def _register(self, info: EngineInfo) -> None:
        training, checkpointing = self._config.rl_training, self._config.checkpointing
        wanted = batch_size(training.update_frequency)
        self.status.batch_size = await self._source.register(
            wandb_group="",
            wandb_project="",
            batch_size=wanted,
            max_token_len=info.max_model_len,
            checkpoint_dir=checkpointing.checkpoint_dir,
            save_checkpoint_interval=checkpointing.interval,
            starting_step=self._learner.status().step,
            num_steps=MANY_STEPS,
        )
        self._registered = True
        log("registered with Atropos", url=self.status.url, batch_size=self.status.batch_size)
        if self.status.batch_size != wanted:
            log("Atropos keeps the batch size of an earlier trainer", logging.WARNING, wanted=wanted)

    async def _take(self, group: ScoredData, info: EngineInfo) -> None:
        """Keep a group, or count it as refused. Raises TandemError if it could not be kept."""
        try:
            made = trajectories(
                group, vocab_size=info.vocab_size, most_tokens=info.max_model_len, created=self._clock()
            )
        except InvalidRequest as e:
            self.status.refused_groups += 1
            log("a group of Atropos is not learned from", logging.WARNING, reason=e.message, env_id=group.env_id)
            return
        await self._learner.add(made, len(made))
        self.status.trajectories += len(made)
        self.status.without_logprobs += sum(t.external for t in made)

    def _count(self) -> None:
        """Count a request, and the batch that it got; log what may be wrong after many requests without one."""
        if self._left:
            self._looks = 0
            self.status.batches += 1
            return
        self._looks += 1
        if self._looks == PATIENCE:
            text = "Atropos has no batch yet: an environment has to run, and the size of its groups to divide the batch"
            log(text, logging.WARNING, url=self.status.url, batch_size=self.status.batch_size)

    def _fail(self, event: str, error: str) -> None:
        """Record an error, which is logged once."""
        if error != self.status.error:
            log(event, logging.WARNING, url=self.status.url, error=error)
        self.status.error = error

    def describe(self) -> dict[str, object]:
        """Return the status for clients."""
        return structs.asdict(self.status)

"""Adapter versions that Tinker's clients sample from: each is in the engine's memory while a sampler needs it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict

from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import Conflict, EngineError, InvalidRequest
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.log import log
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource

MOST_READ = 64
"""Most checkpoints that are kept ready to be sampled from. The engine reads others again when they are needed."""


class Versions:
    """The versions of all samplers. Each holder of a version releases it when it needs it no more."""

    def __init__(self, client: EngineClient, models: Models):
        """Begin without versions. `models` knows which contents adapters of other clients have."""
        self._client = client
        self._models = models
        self._numbers = itertools.count(1)
        self._holders: Counter[str] = Counter()  # by digest
        self._read: OrderedDict[AdapterSource, AdapterRef] = OrderedDict()  # the one that was used last is at the end
        self._engine = client.epoch
        self._reading = asyncio.Lock()

    async def publish(self, trainer: str, name: str) -> AdapterRef:
        """Return a version with a trainer's present weights, which is held until `release`."""
        return self._held(name, await self._client.publish_trainer(trainer))

    async def read(self, source: AdapterSource, name: str) -> AdapterRef:
        """Return the version that a checkpoint's folder holds. It need not be released. Raises ModelError."""
        async with self._reading:
            return await self._kept(source, name)

    async def _kept(self, source: AdapterSource, name: str) -> AdapterRef:
        """Return the version of a folder, which is read unless it is kept. The caller holds the lock."""
        if self._engine != self._client.epoch:  # the engine has ended, and what it had read with it
            self._engine = self._client.epoch
            self._read.clear()
            self._holders.clear()
        ref = self._read.get(source)
        if ref is None:
            try:
                info = await self._client.load_adapter(source)
            except Conflict as e:  # which clients would repeat for minutes
                raise InvalidRequest(e.message, param=e.param) from e
            ref = self._read[source] = self._held(name, info)
            while len(self._read) > MOST_READ:
                await self.release(self._read.popitem(last=False)[1])
        self._read.move_to_end(source)
        return ref

    async def forget(self, source: AdapterSource) -> None:
        """Release what was read from a folder that goes."""
        ref = self._read.pop(source, None)
        if ref is not None:
            await self.release(ref)

    async def release(self, ref: AdapterRef) -> None:
        """Let the engine forget a version once its last request has ended, unless somebody else needs its content."""
        self._holders[ref.digest] -= 1
        if self._holders[ref.digest] > 0:
            return
        del self._holders[ref.digest]
        if self._models.registry.holders(ref.digest):
            return
        try:
            await self._client.unload_adapter(ref.digest)
        except EngineError as e:  # The engine has ended, and its adapters with it.
            log("adapter not unloaded", digest=ref.digest, error=e.message)

    def _held(self, name: str, info: AdapterInfo) -> AdapterRef:
        self._holders[info.digest] += 1
        return AdapterRef(name, next(self._numbers), info.digest, info.invocation)

"""The engine's loop on the reference runner behind a socket pair, turned by hand."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLTokenizer

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.adapters.store import AdapterStore
from mlx_tandem.config import DutyConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.core import EngineCore, Gauges
from mlx_tandem.engine.grammars.masks import Grammars
from mlx_tandem.engine.loading import Loader
from mlx_tandem.engine.pipeline import Pipeline
from mlx_tandem.engine.plan import Runner, StepPlan, StepResult
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.time_share import TimeShare
from mlx_tandem.engine.trainers import TrainerBackend, TrainerHost
from mlx_tandem.engine.wire import EngineChannel, FrameReader, decode_outbound, encode
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.hashing import Namespace
from mlx_tandem.kv.prefix import PrefixCache
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, Delta, Request, SamplingParams
from tests.engine.reference import ReferenceRunner, WatchedPool, WrappedRunner
from tests.engine.workloads import VOCAB

Message = TypeVar("Message")


class Recording(WrappedRunner):
    """A runner that notes the order of launches and reads."""

    def __init__(self, inner: ReferenceRunner):
        super().__init__(inner)
        self.calls: list[str] = []

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Any:
        if plan.has_step:
            self.calls.append(f"launch {self.inner.launches}")
        return super().launch(plan, on_built)

    def sample(self, handle: Any, masks: Any) -> None:
        self.calls.append(f"sample {handle.number}")
        super().sample(handle, masks)

    def wait(self, handle: Any) -> StepResult:
        self.calls.append(f"wait {handle.number}")
        return super().wait(handle)

    def reset(self) -> None:
        self.calls.append("reset")
        super().reset()


def no_tokenizer() -> LLTokenizer:
    raise InvalidRequest("the reference runner has no tokenizer")


class Front:
    """The front's end of the channel and the core behind it, turned by hand."""

    def __init__(
        self,
        most_bytes: int = 1 << 30,
        most_loaded: int = 0,
        max_loras: int = 2,
        trainers: TrainerBackend | None = None,
        duty: DutyConfig | None = None,
        trainer_bytes: int = 1 << 30,
        eos: tuple[int, ...] = (),
        pieces: Iterator[None] | None = None,
        **runner_options: Any,
    ):
        self.socket, engine = socket.socketpair()
        self.weights: dict[str, AdapterWeights] = {}
        self.reference = ReferenceRunner(
            32,
            4,
            4,
            max_loras,
            VOCAB,
            known=self.weights.keys(),  # type: ignore[arg-type]
            **runner_options,
        )
        self.runner = Recording(self.reference)
        self.pool = WatchedPool(self.reference)
        group = AttentionGroup(self.pool)
        self.slots = SlotTable(max_loras)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4),
            BlockManager([group], [PrefixCache(group, Namespace("weights", "tokenizer", "float32", 4))]),
            self.slots,
            max_model_len=64,
            vocab_size=VOCAB,
            eos_token_ids=eos,
        )
        self.read: Callable[[Path], AdapterWeights] = lambda path: adapter(path.name)
        runner: Runner = self.runner
        adapters = Adapters(
            AdapterStore(self.weights, most_bytes=most_bytes, most=most_loaded),
            Loader(lambda source: self.read(Path(source.path))),
            self.slots,
            pieces,
        )
        self.duty = TimeShare(duty or DutyConfig())
        self.trainers = TrainerHost(
            None if trainers is None else lambda: trainers,
            adapters,
            learns=self.duty.learns,
            most_rank=8,
            budget_bytes=trainer_bytes,
        )
        self.core = EngineCore(
            EngineChannel(engine),
            Pipeline(self.scheduler, runner, self.duty, self.trainers),
            adapters,
            Grammars(no_tokenizer, VOCAB, lambda: None),
            Gauges(self.pool, self.slots),
            heartbeat_seconds=0.0,
        )
        self.received: list[m.Outbound] = []
        self._frames = FrameReader()

    def send(self, *messages: m.Inbound) -> None:
        self.socket.sendall(encode(messages))

    def receive(self) -> None:
        """Take in all that the core has sent so far."""
        while select.select([self.socket], [], [], 0.0)[0]:
            data = self.socket.recv(1 << 16)
            if not data:
                return
            for frame in self._frames.feed(data):
                self.received += decode_outbound(frame)

    def turn(self, n: int = 1) -> None:
        for _ in range(n):
            self.core.turn()
            self.receive()

    def finish(self, most: int = 5000) -> None:
        """Turn until the core has nothing left to do."""
        self.turn()
        for _ in range(most):
            if self.core._is_idle:
                return
            self.turn()
        raise AssertionError("never idle")

    def got(self, kind: type[Message]) -> list[Message]:
        return [x for x in self.received if isinstance(x, kind)]

    @property
    def deltas(self) -> list[Delta]:
        return [d for output in self.got(m.Output) for d in output.deltas]

    def tokens(self, request: int, choice: int = 0) -> list[int]:
        return [t for d in self.deltas if (d.request, d.choice) == (request, choice) for t in d.tokens]

    def finished(self) -> set[int]:
        return {d.request for d in self.deltas if d.finish}

    def load(self, *names: str) -> None:
        self.send(*(m.LoadAdapter(i, AdapterSource(f"/adapters/{name}")) for i, name in enumerate(names, 100)))
        self.turn()
        self.finish()

    def assert_nothing_is_held(self) -> None:
        self.scheduler.check()
        self.slots.check()
        assert self.pool.used_blocks == 0
        assert not any(self.slots.references(d) for d in self.slots.residents())
        assert not self.core._adapters.holds._held
        store = self.core._adapters.store
        store.check()
        assert not any(store.users(digest) for digest in self.weights), "somebody still counts as a user"


def adapter(digest: str) -> AdapterWeights:
    return AdapterWeights(AdapterInfo(digest, 8, 1.0, "mlx-lm", ("q_proj",), 64, 64), {})


def request(number: int, adapter: str | None = None, *, max_tokens: int = 6, n: int = 1, length: int = 5) -> Request:
    ref = AdapterRef(adapter, 1, adapter) if adapter else None
    return Request(number, tuple(range(1, 1 + length)), SamplingParams(max_tokens=max_tokens, seed=number), ref, n)


def no_trainers() -> TrainerHost:
    """A host of an engine that does not learn."""
    adapters = Adapters(AdapterStore({}, most_bytes=0, most=0), Loader(lambda source: adapter("none")), SlotTable(0))
    return TrainerHost(None, adapters, learns=False, most_rank=0, budget_bytes=0)

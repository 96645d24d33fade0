"""An engine of the scheduler and the reference runner, and the oracle that its answers are held against."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine import scheduler as scheduler_module
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.budget import UNLIMITED
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.grammars.masks import Grammars
from mlx_tandem.engine.kv_offload.drive import Drive
from mlx_tandem.engine.kv_offload.offload import KVOffload
from mlx_tandem.engine.masks import Place
from mlx_tandem.engine.plan import Mask, Runner
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.kv.hashing import Namespace
from mlx_tandem.kv.prefix import PrefixCache
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests.engine import drive as drives
from tests.engine.harness import Loop
from tests.engine.reference import ReferenceRunner, open_groups
from tests.engine.toy_model import BASE, STATE, Windows, alone, begins_in, embedding_alone, logprob_of, scores_alone
from tests.waiting import until

VOCAB = 13
EOS = 12


def mask_at(grammars: Grammars, place: Place) -> Mask:
    """The mask of a place; one that is late on a busy machine is asked for again, as the scheduler does it."""
    while (mask := grammars.masks([place])[0]) is None:
        grammars.prepare(place)
        until(lambda: grammars.is_ready(place.request.id, place.choice))
    return mask


class OddChunks(CostModel):
    """Affords chunks of any length, which the real model's few lengths would hide mistakes behind."""

    def __init__(self, rng: Random, longest: int):
        super().__init__()
        self._rng = rng
        self._longest = longest

    def affordable(self, context: int, milliseconds: float, longest: int) -> int:
        return self._rng.randint(1, self._longest)

    def predict(self, length: int, context: int) -> float:
        return self._rng.choice((0.0, 1e9))  # the next chunk fits, or it does not


def namespace_of(block_size: int) -> Namespace:
    return Namespace("weights", "tokenizer", "float32", block_size)


@dataclass(slots=True)
class Engine:
    """What a test needs of one engine on the reference runner."""

    runner: ReferenceRunner
    loop: Loop
    max_num_seqs: int

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def room(self) -> int:
        """Tokens that fit."""
        return min(self.scheduler._max_model_len, self.scheduler._blocks.longest)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_loras: int = 4,
    depth: int = 1,
    max_model_len: int = 4096,
    eos: tuple[int, ...] = (),
    prefill_batch_size: int = 0,
    max_inflight_tokens: int = 0,
    prefixes: bool = True,
    drive: Drive | None = None,
    write_through: bool = False,
    read_seconds: float = 60.0,
    max_chunk_tokens: int = 1024,
    piggybacked: int = 0,
    wrap: Callable[[ReferenceRunner], Runner] = lambda runner: runner,
    **runner_options: object,
) -> Engine:
    runner = ReferenceRunner(num_blocks, block_size, max_num_seqs, max_loras, VOCAB, may_wait=True, **runner_options)  # type: ignore[arg-type]
    groups = open_groups(runner, max_chunk_tokens)
    slots = SlotTable(max_loras)
    caches = [PrefixCache(group, namespace_of(block_size)) for group in groups] if prefixes else []
    offload = (
        KVOffload(groups, caches, write_through=write_through, read_seconds=read_seconds) if drive and caches else None
    )
    if isinstance(drive, drives.LateDrive):
        drive.tables = sum(w != STATE for w in runner.windows)
    if offload is not None and drive is not None:
        offload.open(drive, drives.BASE)
    scheduler = scheduler_module.Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_chunk_tokens=max_chunk_tokens,
            prefill_batch_size=prefill_batch_size,
            max_inflight_tokens=max_inflight_tokens,
        ),
        BlockManager(groups, caches, offload),
        slots,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        limits=UNLIMITED._replace(piggybacked=piggybacked),
    )
    loop = Loop(scheduler, wrap(runner), groups[0].pool, slots, depth=depth)
    return Engine(runner, loop, max_num_seqs)


def request(
    number: int,
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
    *,
    n: int = 1,
    adapter: str | None = None,
    max_tokens: int = 6,
    temperature: float = 1.0,
    seed: int = 0,
    stop: tuple[int, ...] = (),
    penalty: float = 0.0,
    priority: int = 0,
    **params: Any,
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop_token_ids=stop,
        presence_penalty=penalty,
        **params,
    )
    return Request(number, prompt, sampling, AdapterRef(adapter, 1, adapter) if adapter else None, n, priority)


def digest_of(request: Request) -> str:
    return request.adapter.digest if request.adapter else BASE


def expected(
    request: Request,
    choice: int,
    eos: tuple[int, ...] = (),
    windows: Windows = (None,),
    masks: Masks | None = None,
) -> list[int]:
    stops = request.params.stop_token_ids + (() if request.params.ignore_eos else eos)
    is_masked = masks is not None and masks.constrains(request)
    mask_of = (lambda tokens: masks.mask_of(request, choice, tokens)) if is_masked and masks is not None else None
    begins = begins_in(request.prompt, request.adapter)
    digest = digest_of(request)
    return alone(request.prompt, request.params, choice, digest, VOCAB, stops, windows, mask_of, begins)


class NeverLate:
    """What makers have in common whose masks always come in time."""

    def is_slow(self, request: int, choice: int) -> bool:
        return False

    def prepare(self, place: Place) -> None:
        raise AssertionError("no mask is late")

    def is_ready(self, request: int, choice: int) -> bool:
        raise AssertionError("no mask is late")


class Masks(NeverLate):
    """Masks that depend on every token before them, for about every other request; none of them allows nothing."""

    def __init__(self, eos: tuple[int, ...] = (), share: int = 2):
        self._eos, self.share = eos, share
        self.open: set[tuple[int, int]] = set()  # choices that drew by masks and were not forgotten

    def constrains(self, request: Request) -> bool:
        return request.params.seed % self.share == 0

    def masks(self, places: Several[Place]) -> Several[Mask | None]:
        self.open |= {(request.id, choice) for request, choice, _ in places}
        for request, choice, tokens in places:
            output = tokens[len(request.prompt) :]
            assert stops_of(request, self._eos).isdisjoint(output), f"what follows the end of {request.id}, {choice}?"
        return [self.mask_of(*place) for place in places]

    def forget(self, request: int, choice: int) -> None:
        self.open.discard((request, choice))

    def mask_of(self, request: Request, choice: int, tokens: Several[int]) -> bytes:
        bits = _bits(choice, tuple(tokens))
        drawable = set(request.params.allowed_token_ids or range(VOCAB)) - stops_of(request, self._eos)
        if not any(bits >> t & 1 for t in drawable):
            bits = (1 << VOCAB) - 1
        return bits.to_bytes(4, "little")


@lru_cache(maxsize=1000)
def _bits(choice: int, tokens: tuple[int, ...]) -> int:
    """One for each token that a mask behind `tokens` allows. A workload asks for it, and who judges it again."""
    key = hash((choice, tokens))
    return sum(1 << t for t in range(VOCAB) if hash((key, t)) % 3)


def stops_of(request: Request, eos: tuple[int, ...]) -> set[int]:
    return set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else set(eos))


def assert_exact(loop: Loop, eos: tuple[int, ...] = (), windows: Windows = (None,), masks: Masks | None = None) -> None:
    """Each sequence said what it says alone; those that did not finish, a beginning of it."""
    for (request_id, choice), tokens in loop.tokens.items():
        request = loop.requests[request_id]
        want = expected(request, choice, eos, windows, masks)
        finish = loop.finished.get((request_id, choice))
        where = f"request {request_id}, choice {choice}"
        if request_id in loop.moved:  # the harness looked at each token
            most, stops = request.params.max_tokens, stops_of(request, eos)
            assert (finish is None) or (finish == "stop") == (tokens[-1] in stops), f"{where}: finish is {finish}"
            assert finish != "length" or len(tokens) == most, f"{where}: {len(tokens)} tokens of {most}"
        elif finish is None:
            assert tokens == want[: len(tokens)], f"{where}: wrong tokens before its end"
        else:
            assert tokens == want, f"{where}: wrong tokens"
            assert finish == ("stop" if want[-1] in stops_of(request, eos) else "length"), (
                f"{where}: finish is {finish}"
            )
        logprobs = loop.logprobs[request_id, choice]
        asked = request.params.logprobs is not None
        assert logprobs == ([logprob_of(t, request.params) for t in tokens] if asked else []), f"{where}: logprobs"
        own = digest_of(request), windows, begins_in(request.prompt, request.adapter)
        hidden = array("f", loop.embeddings.get(request_id, b"")).tolist()
        if tokens and request.pooling is not None:
            right = embedding_alone(request.prompt, request.pooling, *own)
            assert hidden == array("f", right).tolist(), f"{where}: embedding"
        else:
            assert not hidden, f"{where}: nobody asked for an embedding"
        if tokens and request.params.prompt_logprobs is not None:
            scores, said = (
                scores_alone(request.prompt, request.params, *own),
                loop.prompt_logprobs.get(request_id, []),
            )
            assert said == scores or (request_id in loop.moved and len(said) == len(scores)), (
                f"{where}: prompt logprobs"
            )
        else:
            assert request_id not in loop.prompt_logprobs or tokens == [], f"{where}: nobody asked"

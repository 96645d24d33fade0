"""The real runner under the tests' loop, and mlx-lm's own single-sequence generation as its oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.budget import UNLIMITED
from mlx_tandem.engine.images import Images
from mlx_tandem.engine.kv_offload.drive import Drive
from mlx_tandem.engine.kv_offload.offload import KVOffload
from mlx_tandem.engine.ranks.leader import RankLeader
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.kv.hashing import Namespace
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.kv.prefix import PrefixCache
from mlx_tandem.model.build import Built, build
from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.choices import Kept
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.types import Request
from tests.engine.harness import Loop
from tests.engine.workloads import OddChunks

TOLERANCE = 1e-4
"""Of a logprob, in float32."""
NEAR_TIE = 1e-5
"""Two tokens whose logprobs are this close may change places."""


@dataclass
class Engine:
    built: Built
    weights: dict[str, AdapterWeights]
    ranks: int = 1

    def loop(
        self,
        *,
        blocks: int = 0,
        window_blocks: int = 0,
        chunks: int = 0,
        piggybacked: int = 0,
        depth: int = 1,
        drive: Drive | None = None,
        write_through: bool = True,
        image_room: int = 0,
        limited: bool = False,
    ) -> Loop:
        """A scheduler of `blocks`, and of `window_blocks` where there are two pools, over the runner; 0: all. `chunks`:
        prompts are cut into pieces of random length up to this. `piggybacked`: so many tokens of prompts go with rows
        that decode. `drive`: gets each block as soon as it is full, or when it is given to others.
        `image_room`: so many embeddings of images are kept; 0: as many as the runner may. `limited`: no step is larger
        than activations have memory for."""
        info = self.built.info
        slots = SlotTable(info.max_loras)
        groups = open_groups(info.memory, info.block_size)
        for group, few in zip(groups, (blocks, window_blocks), strict=False):
            if few:
                group.pool = BlockPool(few, info.block_size, first=group.pool.scratch)
        caches = [PrefixCache(group, Namespace("", "", info.dtype, info.block_size)) for group in groups]
        offload = KVOffload(groups, caches, write_through=write_through, ranks=self.ranks)
        if drive is not None:
            offload.open(drive, bytes(32))
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=info.max_num_seqs,
                max_chunk_tokens=self.built.step_limits.tokens if limited else info.memory.pools[-1].row or 1024,
            ),
            BlockManager(groups, caches, offload),
            slots,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=(),
            limits=self.built.step_limits if limited else UNLIMITED._replace(piggybacked=piggybacked),
        )
        if info.vision is not None and self.built.image_room:
            scheduler.images = Images(info.vision.tokens, image_room or self.built.image_room, self.built.image_columns)
        if chunks:
            scheduler.prefill.cost = OddChunks(Random(chunks), chunks)
        return Loop(scheduler, self.built.runner, groups[0].pool, slots, depth=depth)

    def run(
        self,
        requests: Sequence[Request],
        *,
        blocks: int = 0,
        window_blocks: int = 0,
        chunks: int = 0,
        piggybacked: int = 0,
        depth: int = 1,
        stagger: int = 0,
    ) -> Loop:
        """Serve `requests` to their end. `stagger`: steps between one arrival and the next."""
        loop = self.loop(
            blocks=blocks, window_blocks=window_blocks, chunks=chunks, piggybacked=piggybacked, depth=depth
        )
        for request in requests:
            loop.add(request)
            for _ in range(stagger):
                loop.step()
        loop.run()
        loop.assert_idle()
        return loop


def make_engine(
    folder: Path,
    *,
    block_size: int = 8,
    num_blocks: int = 48,
    max_num_seqs: int = 6,
    max_chunk_tokens: int = 1024,
    max_loras: int = 3,
    max_rank: int = 16,
    kv_bits: Literal[4, 8, 16] = 16,
    kv_group_size: int = 64,
    attention_backend: Literal["auto", "portable", "cuda", "metal"] = "auto",
    backends: Sequence[Fused] | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    deterministic: bool = False,
    unpack_weights: bool = False,
    kept: Kept | None = None,
    method: Literal["none", "mtp"] = "none",
    prepare: bool = True,
    parallel: ParallelConfig | None = None,
    leader: RankLeader | None = None,
) -> Engine:
    """With a `leader`, rank 0 of several, whose other ranks are begun here."""
    weights: dict[str, AdapterWeights] = {}
    config = EngineConfig(
        model=ModelConfig(path=str(folder), dtype=dtype, unpack_weights=unpack_weights),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            attention_backend=attention_backend,
        ),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_chunk_tokens=max_chunk_tokens),
        lora=LoraConfig(max_loras=max_loras, max_lora_rank=max_rank, prepare=prepare),
        deterministic=deterministic,
        speculation=SpeculationConfig(method),
        parallel=parallel or ParallelConfig(),
    )
    if leader is not None:
        leader.begin(config)
    built = build(config, weights, lambda stage, fraction: None, backends, kept=kept, leader=leader)
    return Engine(built, weights, config.parallel.ranks)


class _RoundedCache(KVCache):
    """mlx-lm's cache of keys and values that went through so many bits."""

    def __init__(self, bits: int, group: int) -> None:
        super().__init__()
        self._bits, self._group = bits, group

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(self._rounded(keys), self._rounded(values))

    def _rounded(self, x: mx.array) -> mx.array:
        form = RowFormat(x.shape[1], x.shape[3], x.dtype, self._bits, self._group)
        return form.decode(form.encode(x.reshape(-1, x.shape[3]))).reshape(x.shape)


@dataclass
class Oracle:
    """A second load of the same folder, run as mlx-lm runs one sequence."""

    model: nn.Module
    kv_bits: int = 0  # what its cache keeps of keys and values, rounded before anything reads them
    kv_group_size: int = 64
    _known: dict[tuple[int, ...], np.ndarray[Any, Any]] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path, *, kv_bits: int = 0, kv_group_size: int = 64) -> Oracle:
        model, _ = load_model(folder)
        return Oracle(model, kv_bits, kv_group_size)

    def cache(self) -> list[Any]:
        own: list[Any] = make_prompt_cache(self.model)
        return [_RoundedCache(self.kv_bits, self.kv_group_size) for _ in own] if self.kv_bits else own

    def prompt_logprobs(self, prompt: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """[tokens, vocabulary], each row of the token after it, by one plain forward over `prompt` or more."""
        known = next((rows for text, rows in self._known.items() if text[: len(prompt)] == prompt), None)
        if known is None:
            model: Any = self.model
            logits = model(mx.array([prompt]), cache=self.cache())[0].astype(mx.float32)
            self._known[prompt] = known = np.array(logits - mx.logsumexp(logits, -1, keepdims=True))
        return known[: len(prompt)]

    def logprobs(self, prompt: tuple[int, ...], said: Sequence[int]) -> np.ndarray[Any, Any]:
        """[tokens, vocabulary], each row of the token of `said` at its place, by two forwards: over the prompt, then
        over what was said. One for each token takes ten times as long; test_sensitivity.py shows that they agree."""
        text = (*prompt, *said[:-1])
        if text not in self._known:
            model: Any = self.model
            cache, parts = self.cache(), []
            for part in filter(None, (prompt, text[len(prompt) :])):
                logits = model(mx.array([part]), cache=cache)[0].astype(mx.float32)
                parts.append(np.array(logits - mx.logsumexp(logits, -1, keepdims=True)))
            self._known[text] = np.concatenate(parts)
        return self._known[text][len(prompt) - 1 :]

    def one_by_one(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], list[np.ndarray[Any, Any]]]:
        """The tokens that mlx-lm says and, at each, the logprobs of the whole vocabulary, by a forward for each."""
        model: Any = self.model
        tokens: list[int] = []
        logprobs: list[np.ndarray[Any, Any]] = []
        cache = self.cache()
        for _ in range(max_tokens):
            step = mx.array([prompt if not tokens else tokens[-1:]])
            logits = model(step, cache=cache)[0, -1].astype(mx.float32)
            logprobs.append(np.array(logits - mx.logsumexp(logits)))
            tokens.append(int(logprobs[-1].argmax()))
        return tokens, logprobs


def assert_agrees(
    loop: Loop,
    oracle: Mapping[str | None, Oracle] | Oracle,
    case: str,
    tolerance: float = TOLERANCE,
    near_tie: float = NEAR_TIE,
) -> list[str]:
    """Every greedy sequence says at each token what is likeliest to the oracle behind what it has said before, hence
    what the oracle says by itself; and its logprobs and likeliest tokens are the oracle's.

    Returns the near-ties at which another token was as likely.
    """
    ties: list[str] = []

    def own(request: Request) -> Oracle:
        name = request.adapter.digest if request.adapter else None
        return oracle if isinstance(oracle, Oracle) else oracle[name]

    for (number, choice), tokens in loop.tokens.items():
        request = loop.requests[number]
        assert len(tokens) == request.params.max_tokens, f"{case}: request {number} has {len(tokens)} tokens"
        logprobs = own(request).logprobs(request.prompt, tokens)
        for i, (token, said, lp) in enumerate(zip(tokens, loop.logprobs[number, choice], logprobs, strict=True)):
            where = f"{case}: request {number}, choice {choice}, token {i}"
            assert abs(said.model - lp[token]) < tolerance, f"{where}: logprob {said.model}, should be {lp[token]}"
            best = np.sort(lp)[::-1]
            for rank, (likely, value) in enumerate(said.top):
                assert abs(value - lp[likely]) < tolerance, f"{where}: the logprob of token {likely}"
                assert abs(value - best[rank]) < tolerance, f"{where}: the {rank}th likeliest token"
            gap = best[0] - lp[token]
            assert gap < near_tie, f"{where}: {token}, should be {lp.argmax()}, by {gap}"
            if gap:
                ties.append(f"{where}: {token} and {lp.argmax()} differ by {gap:.1e}")
    for request in loop.requests.values():  # parts of what was computed above, where something was said
        _check_prompt(loop, request, own(request), case, tolerance, near_tie)
    return ties


def _check_prompt(loop: Loop, request: Request, oracle: Oracle, case: str, tolerance: float, near_tie: float) -> None:
    """The prompt's logprobs, ranks and likeliest tokens are those of a plain forward."""
    k = request.params.prompt_logprobs
    said = loop.prompt_logprobs.get(request.id, [])
    if request.id in loop.failed:
        return
    assert len(said) == (0 if k is None else len(request.prompt) - 1), f"{case}: request {request.id}"
    if not said:
        return
    for i, (token, own, lp) in enumerate(
        zip(request.prompt[1:], said, oracle.prompt_logprobs(request.prompt), strict=False)
    ):
        where = f"{case}: request {request.id}, token {i + 1} of the prompt"
        assert abs(own.model - lp[token]) < tolerance, f"{where}: logprob {own.model}, should be {lp[token]}"
        # The token itself is among those that are no less likely.
        assert (lp > lp[token] + near_tie).sum() < own.rank <= (lp > lp[token] - near_tie).sum(), f"{where}: rank"
        best = np.sort(lp)[::-1]
        assert len(own.top) == k, f"{where}: {len(own.top)} likeliest tokens"
        for rank, (likely, value) in enumerate(own.top):
            assert abs(value - lp[likely]) < tolerance, f"{where}: the logprob of token {likely}"
            assert abs(value - best[rank]) < tolerance, f"{where}: the {rank}th likeliest token"

"""`tandem bench engine`: measures the engine's loop in this process, in turn with mlx-lm's BatchGenerator.

The engine runs as it does behind the server, with a script instead of the front (script.py): the script hands
requests in, notes when their tokens come out, and gives the device to the peer in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from mlx_tandem.cli.bench.floor import Floor
from mlx_tandem.cli.bench.left import Left
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.script import Answers, Script, Work, run_script
from mlx_tandem.cli.bench.sides import BASE, DRAFTS, MIXED, PEER, SAME, Rounds, line, summary
from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.cli.bench.workloads import GREEDY, SAMPLING, Sampling
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.outputs import write_json
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.errors import TandemError
from mlx_tandem.files import StorageError
from mlx_tandem.generation.prompts import Prompts
from mlx_tandem.types import AdapterRef, AdapterSource, EngineInfo, Request, SamplingParams

RANK = 16
"""Rank of the random adapters, which change every linear."""


Text = Literal["free", "chat", "repeats", "random"]
"""The content of rows: the model's own answers by `sampling` to random tokens or to questions, one repeated token,
which drafts foresee, or random tokens.
"""

QUESTIONS = (
    "Tell me a short story about a fox.",
    "Count from 1 to 40.",
    "Think, then answer: 347 + 285",
    "Tell me a short story about a bear.",
)
"""The prompts of rows with the text "chat", in turn."""


@dataclass(frozen=True)
class Batch:
    """A number of sequences that run at once, and the tokens of each prompt."""

    rows: int
    prompt_tokens: int


@dataclass(frozen=True)
class EngineLoad:
    """The load to measure.

    With `adapters`, each batch runs without any, with one for all rows, and with all in turn. With `num_requests`, a
    closed loop of so many requests follows each batch, with as many under way as it has rows.
    """

    batches: tuple[Batch, ...]
    max_tokens: int = 128
    num_requests: int | None = None
    repeats: int = 3
    sampling: Sampling = "mixed"
    adapters: int = 0
    bits: int | None = None  # bits of the weights of a model made by shape; None: not quantised
    peer: bool = True
    spec: Literal["none", "ngram", "draft", "mtp"] = "none"
    draft_model: str = ""  # folder, for drafts by a smaller model
    ngram_max: int = 8  # most tokens that are compared to copy drafts; below 8, nothing is copied beside a draft model
    text: Text = "free"

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return max(batch.prompt_tokens for batch in self.batches) + self.max_tokens

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that take turns."""
        return (
            BASE,
            *((SAME, MIXED) if self.adapters else ()),
            *((DRAFTS,) if self.spec != "none" else ()),
            *((PEER,) if self.peer else ()),
        )


def run(
    load: EngineLoad,
    *,
    model: str | None,
    shape: str | None,
    random_weights: bool,
    cache: CacheConfig,
    max_chunk_tokens: int,
    json_out: Path | None,
    picture: Path | None,
) -> None:
    """Measure, write the JSON file after each round, show a table, and draw the picture."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        folders: list[Path] = []
        if shape is not None:
            model, random_weights, folders = _make(Path(scratch), shape, load)
        assert model is not None
        most = max(batch.rows for batch in load.batches)
        config = EngineConfig(
            model=ModelConfig(path=model, random_weights=random_weights),
            cache=cache,
            scheduler=SchedulerConfig(
                max_num_seqs=most if load.spec == "none" else max(most, 64), max_chunk_tokens=max_chunk_tokens
            ),
            lora=LoraConfig(max_loras=load.adapters, max_cpu_lora_gb=64.0, prepare=True),
            speculation=SpeculationConfig(load.spec, load.draft_model, ngram_max=load.ngram_max),
        )
        result = describe() | {"model": shape or model, "load": msgspec.to_builtins(load)}

        def keep(found: dict[str, Any]) -> None:
            result.update(found)
            if json_out:
                with contextlib.suppress(StorageError):  # only the last write reports an error
                    write_json(json_out, result)

        try:
            chats = asyncio.run(_chats(Path(model))) if load.text == "chat" else ()
            EngineBench(config, load, folders, keep, chats=chats).measure()
        except TandemError as e:
            fail(e.message)
    from mlx_tandem.cli.bench.report import engine_table

    show(engine_table(result))
    try:
        if json_out:
            write_json(json_out, result)
        if picture is not None:
            from mlx_tandem.cli.bench.plot import plot_engine

            plot_engine(result, picture)
    except StorageError as e:
        fail(e.message)


async def _chats(folder: Path) -> list[tuple[int, ...]]:
    """Return QUESTIONS as prompts by the chat template of a model. Raise TandemError if it has none."""
    prompts = Prompts(folder)
    try:
        return [tuple(await prompts.chat([{"role": "user", "content": text}])) for text in QUESTIONS]
    finally:
        await prompts.close()


def _make(folder: Path, name: str, load: EngineLoad) -> tuple[str, bool, list[Path]]:
    """Return a folder of the named shape, whether its weights are drawn when it is loaded, and folders of adapters."""
    from mlx_tandem.cli.bench.hybrid_shape import HYBRIDS, HybridShape
    from mlx_tandem.cli.bench.shapes import POSITIONS, SHAPES, write_adapter, write_model

    shape = SHAPES.get(name) or HYBRIDS.get(name)
    if shape is None:
        fail(f"there is no shape '{name}'; known are: {', '.join((*SHAPES, *HYBRIDS))}")
    drawn = isinstance(shape, HybridShape) or shape.dtype != "float32" or load.bits is not None
    longest = max(POSITIONS, load.longest)
    model = write_model(folder / name, shape, positions=longest, weights=not drawn, bits=load.bits)
    with ThreadPoolExecutor() as pool:
        adapters = list(
            pool.map(lambda i: write_adapter(folder / f"a{i}", shape, rank=RANK, seed=i), range(load.adapters))
        )
    return str(model), drawn, adapters


class EngineBench:
    """All rounds of one run.

    `keep` is given new parts of the results whenever there are some. `before_round` has the device to itself before
    each round of a batch; the first round, numbered -1, is a warm-up. `chats` are the prompts of the text "chat".
    """

    def __init__(
        self,
        config: EngineConfig,
        load: EngineLoad,
        adapters: Sequence[Path],
        keep: Callable[[dict[str, Any]], None],
        before_round: Callable[[int], None] = lambda repeat: None,
        chats: Sequence[tuple[int, ...]] = (),
    ):
        self._config = config
        self._load = load
        self._folders = adapters
        self._keep = keep
        self._before_round = before_round
        self._chats = chats
        self._refs: list[AdapterRef] = []
        self._ids = count(1)
        self._rng = random.Random(0)
        self._peer: Any = None
        self._without_peer = ""  # why the peer was given up

    def measure(self) -> None:
        """Run all rounds. Raise TandemError if the model cannot be served."""
        run_script(self._script, self._config)

    def _script(self, info: EngineInfo) -> Script:
        """Load the adapters, then for each batch run a warm-up and all rounds, in which the sides take turns."""
        floor = Floor.of(self._config, info, RANK)
        self._keep({"engine": msgspec.to_builtins(info), "copy_bytes_per_s": round(floor.bandwidth), "results": []})
        if self._folders:
            answers = yield Work([m.LoadAdapter(i, AdapterSource(str(f))) for i, f in enumerate(self._folders)])
            assert answers is not None
            infos = [answers.adapters[call] for call in range(len(self._folders))]
            self._refs = [AdapterRef(f"a{i}", 1, info.digest) for i, info in enumerate(infos)]
        results: list[dict[str, Any]] = []
        left = Left(len(self._load.batches))
        for batch in self._load.batches:
            rounds: Rounds = {side: [] for side in self._load.sides}
            found: dict[str, Any] = {}
            for repeat in range(-1, self._load.repeats):  # the first is a warm-up
                self._before_round(repeat)
                for side in self._load.sides[:: -1 if repeat % 2 else 1]:
                    figures = yield from self._round(info, batch, side)
                    if figures and self._load.num_requests and side != PEER:
                        figures |= yield from self._loop(info, batch, side, self._load.num_requests)
                    if figures and repeat >= 0:
                        rounds[side].append(figures)
                if repeat >= 0:
                    found = summary(batch.rows, batch.prompt_tokens, rounds, floor, self._load.adapters)
                    no_peer = {"no_peer": self._without_peer} if self._without_peer else {}
                    self._keep({"results": [*results, found]} | no_peer)
            results.append(found)
            print(f"{line(found)} tok/s  {left.after()}", file=sys.stderr, flush=True)

    def _round(
        self, info: EngineInfo, batch: Batch, side: str
    ) -> Generator[Work, Answers | None, dict[str, float] | None]:
        """Return the figures of one side, or None if the peer was given up.

        The prompts are first answered with one token each, then with all tokens: by then the engine has their
        prefixes cached, so that all rows start together.
        """
        prompts = self._prompts(info, batch, batch.rows)
        timelines = []
        for max_tokens in (1, self._load.max_tokens):
            if side == PEER:
                timeline = self._run_peer(info, prompts, max_tokens)
                if timeline is None:
                    return None
            else:
                answers = yield Work(self._requests(prompts, max_tokens, side))
                assert answers is not None
                timeline = answers.timeline
            timelines.append(timeline)
        prefill, decode = timelines
        return prefill.prefill(sum(map(len, prompts))) | decode.decode(self._load.max_tokens)

    def _loop(
        self, info: EngineInfo, batch: Batch, side: str, num_requests: int
    ) -> Generator[Work, Answers | None, dict[str, float]]:
        """Return the figures of a closed loop as `tandem bench serve` runs it: prompts are read while other rows
        decode.
        """
        prompts = self._prompts(info, batch, num_requests)
        answers = yield Work(self._requests(prompts, self._load.max_tokens, side), batch.rows)
        assert answers is not None
        return answers.timeline.loop(self._load.max_tokens)

    def _requests(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, side: str) -> list[m.Submit]:
        found = []
        for row, prompt in enumerate(prompts):
            temperature, top_p = self._sampling(row)
            only = (row,) if self._load.text == "repeats" else ()
            params = SamplingParams(
                max_tokens, temperature=temperature, top_p=top_p, seed=row, ignore_eos=True, allowed_token_ids=only
            )
            drafts = side == DRAFTS
            own = Request(next(self._ids), prompt, params, adapter=self._adapter(side, row), speculate=drafts)
            found.append(m.Submit(own))
        return found

    def _run_peer(self, info: EngineInfo, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline | None:
        """Run a batch on the peer, which loads the same folder in the engine's type; return None if it fails or has
        failed.

        Whatever ends the peer, such as a lack of memory, ends its part only.
        """
        if self._without_peer:
            return None
        from mlx_tandem.cli.bench.batch_generator import BatchGeneratorPeer, free_dropped_memory

        try:
            if self._peer is None:
                model = msgspec.structs.replace(self._config.model, dtype=cast("Any", info.dtype))
                self._peer = BatchGeneratorPeer(model)
            sampling = [self._sampling(row) for row in range(len(prompts))]
            return Timeline.of(len(prompts), self._peer.generate(prompts, max_tokens, sampling))
        except Exception as e:
            self._peer = None
            self._without_peer = f"{type(e).__name__}: {e}"
        free_dropped_memory()  # outside of the handler, whose error still holds the peer
        print(f"BatchGenerator is left out from here on: {self._without_peer}", file=sys.stderr, flush=True)
        return None

    def _prompts(self, info: EngineInfo, batch: Batch, number: int) -> list[tuple[int, ...]]:
        if self._chats:
            return [self._chats[row % len(self._chats)] for row in range(number)]
        tokens = range(min(info.vocab_size, 256))
        return [tuple(self._rng.choices(tokens, k=batch.prompt_tokens)) for _ in range(number)]

    def _sampling(self, row: int) -> tuple[float, float]:
        if self._load.text == "random":
            return 1e6, 1.0  # the logits of random weights are so large that at 1 a model repeats itself
        return GREEDY if self._load.sampling == "greedy" else SAMPLING[(row + 2) % len(SAMPLING)]

    def _adapter(self, side: str, row: int) -> AdapterRef | None:
        if side in (BASE, DRAFTS):
            return None
        return self._refs[row % len(self._refs) if side == MIXED else 0]

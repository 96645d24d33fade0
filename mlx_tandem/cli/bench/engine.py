"""`tandem bench engine`: the engine's loop in this process, in turn with mlx-lm's BatchGenerator.

The engine runs as it does behind the server, except that its channel is a list in memory: a script takes the place of
the front, hands a batch in, notes when its tokens come out, and gives the device to the peer in between.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
from collections.abc import Generator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.serve import write
from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.cli.bench.workloads import SAMPLING
from mlx_tandem.cli.console import fail, show
from mlx_tandem.config import EngineConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.errors import EngineError, TandemError
from mlx_tandem.types import EngineInfo, Request, SamplingParams

Rounds = Generator[list[Request], Timeline | None, None]
"""Yields a batch for the engine, is sent the timeline of it."""


def run(
    *,
    model: str | None,
    shape: str | None,
    random_weights: bool,
    batches: Sequence[int],
    prompt_tokens: int,
    max_tokens: int,
    repeats: int,
    json_out: Path | None,
) -> None:
    """Measure, show a table, write the JSON file."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        if shape is not None:
            model, random_weights = _make(Path(scratch), shape)
        assert model is not None
        bench = EngineBench(
            EngineConfig(
                model=ModelConfig(path=model, random_weights=random_weights),
                scheduler=SchedulerConfig(max_num_seqs=max(batches)),
            ),
            batches,
            prompt_tokens,
            max_tokens,
            repeats,
        )
        try:
            results = bench.measure()
        except TandemError as e:
            fail(e.message)
    result = describe() | {
        "model": shape or model,
        "engine": msgspec.to_builtins(bench.info),
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "results": results,
    }
    if json_out:
        write(json_out, result)
    from mlx_tandem.cli.bench.report import engine_table

    show(engine_table(result))


def _make(folder: Path, name: str) -> tuple[str, bool]:
    """A folder of the named shape, and whether its weights have to be drawn when it is loaded."""
    from mlx_tandem.cli.bench.shapes import SHAPES, write_model

    if name not in SHAPES:
        fail(f"there is no shape '{name}'; known are: {', '.join(SHAPES)}")
    drawn = SHAPES[name].dtype != "float32"
    write_model(folder, SHAPES[name], weights=not drawn)
    return str(folder), drawn


class EngineBench:
    """All rounds of one run. The peer is loaded from the same folder in the precision that the engine computes in."""

    def __init__(self, config: EngineConfig, batches: Sequence[int], prompt_tokens: int, max_tokens: int, repeats: int):
        self._config = config
        self._batches = batches
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._repeats = repeats
        self._results: list[dict[str, Any]] = []
        self.info: EngineInfo | None = None

    def measure(self) -> list[dict[str, Any]]:
        """One entry per batch size: medians, ratios and raw figures of both. Raises TandemError."""
        from mlx_tandem.worker import serve

        channel = _Script(self)
        with contextlib.suppress(WireError):
            serve(channel, self._config, False)
        return self._results

    def rounds(self, info: EngineInfo) -> Rounds:
        """The script: for each batch size a warm-up, then both in turn."""
        from mlx_tandem.cli.bench.batch_generator import BatchGeneratorPeer

        self.info = info
        model = ModelConfig(
            path=self._config.model.path,
            dtype=cast("Any", info.dtype),
            random_weights=self._config.model.random_weights,
        )
        peer = BatchGeneratorPeer(model)
        rng = random.Random(0)
        ids = count(1)
        for batch in self._batches:
            raw: dict[str, list[dict[str, float]]] = {"tandem": [], "batch_generator": []}
            for repeat in range(-1, self._repeats):  # the first is a warm-up
                prompts = [
                    tuple(rng.randrange(min(info.vocab_size, 256)) for _ in range(self._prompt_tokens))
                    for _ in range(batch)
                ]
                sampling = [SAMPLING[(row + 2) % len(SAMPLING)] for row in range(batch)]
                timelines = {}
                for side in ("tandem", "batch_generator") if repeat % 2 else ("batch_generator", "tandem"):
                    if side == "tandem":
                        timelines[side] = yield [
                            Request(next(ids), prompt, self._params(t, p, row))
                            for row, (prompt, (t, p)) in enumerate(zip(prompts, sampling, strict=True))
                        ]
                    else:
                        timelines[side] = Timeline.of(batch, peer.generate(prompts, self._max_tokens, sampling))
                if repeat >= 0:
                    for side, timeline in timelines.items():
                        assert timeline is not None
                        raw[side].append(timeline.figures(batch * self._prompt_tokens, self._max_tokens))
            self._results.append(_summary(batch, raw))
            print(_line(self._results[-1]), file=sys.stderr, flush=True)

    def _params(self, temperature: float, top_p: float, seed: int) -> SamplingParams:
        return SamplingParams(self._max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=True)


class _Script(EngineChannel):
    """The engine's channel with the bench at the other end, on the same thread."""

    def __init__(self, bench: EngineBench):
        self._bench = bench
        self._rounds: Rounds | None = None
        self._timeline: Timeline | None = None
        self._rows: dict[int, int] = {}
        self._open = 0

    def receive(self, wait: float) -> list[m.Inbound]:
        if self._open:
            return []
        assert self._rounds is not None
        try:
            requests = self._rounds.send(self._timeline)
        except StopIteration:
            raise WireError("all is measured") from None
        self._rows = {request.id: row for row, request in enumerate(requests)}
        self._open = len(requests)
        self._timeline = Timeline(len(requests))
        return [m.Submit(request) for request in requests]

    def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
        for message in messages:
            if isinstance(message, m.Output):
                assert self._timeline is not None
                self._timeline.add([self._rows[d.request] for d in message.deltas for _ in d.tokens])
                self._open -= sum(delta.finish is not None for delta in message.deltas)
            elif isinstance(message, m.Ready):
                self._rounds = self._bench.rounds(message.info)
            elif isinstance(message, m.Failed | m.Fatal):
                raise EngineError(message.message)

    def close(self) -> None:
        pass


def _summary(batch: int, raw: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    ours, theirs = raw["tandem"], raw["batch_generator"]

    def ratio(field: str) -> float:
        return round(
            statistics.median(a[field] / b[field] if b[field] else 0.0 for a, b in zip(ours, theirs, strict=True)), 3
        )

    def medians(side: list[dict[str, float]]) -> dict[str, float]:
        return {field: round(statistics.median(r[field] for r in side), 1) for field in side[0]}

    return {
        "batch": batch,
        "tandem": medians(ours),
        "batch_generator": medians(theirs),
        "ratio": {kind: ratio(f"{kind}_tokens_per_s") for kind in ("decode", "prefill", "total")},
        "rounds": raw,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"batch {row['batch']:>3}  decode tok/s  tandem {row['tandem']['decode_tokens_per_s']:>9,.0f}  "
        f"BatchGenerator {row['batch_generator']['decode_tokens_per_s']:>9,.0f}  ratio {row['ratio']['decode']:.2f}"
    )

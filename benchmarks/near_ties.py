"""Count how often the batch changes the likeliest token, by a seeded search for near-ties in the model's own texts.

    python benchmarks/near_ties.py demo --positions 20000 --json-out benchmarks/results/near_ties-demo.json

Eight rows write texts at temperature 1, together. Then each text is read alone, in one chunk and in chunks of 24
tokens, and all of them are read together. For each position the likeliest tokens and their logprobs are compared with
those of the step that wrote the text:

- differ: number of positions with another likeliest token, for each way of reading;
- texts_differ: number of texts that change when each is written again alone, with the same seed;
- largest: the largest difference of a logprob; gaps: how many positions have the two likeliest tokens closer than that.

`demo` is the model of `tandem demo`; a name of a shape is a model of random weights; else a model folder.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_tandem.model import backend  # first: it loads a fast BLAS before MLX

import numpy as np
from partial import Results

import mlx_tandem
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.model.build import Built, build
from mlx_tandem.types import SamplingParams, TokenLogprob

ROWS, BEGIN, LENGTH, CHUNK = 8, 8, 128, 24
"""Rows that write together, tokens that a text begins with, its tokens in all, and those of a small chunk."""

WAYS = ("together", "alone", "chunked")


class Reader:
    """A runner that writes and reads texts."""

    def __init__(self, built: Built):
        self.built = built
        self.width = -(-LENGTH // built.info.block_size)

    def write(self, begins: Sequence[tuple[int, ...]], seeds: Sequence[int]) -> list[list[tuple[int, TokenLogprob]]]:
        """Return the tokens that rows with these beginnings draw, and the likeliest tokens of each position."""
        params = [SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=seed, logprobs=2) for seed in seeds]
        who = range(len(begins))
        texts: list[list[tuple[int, TokenLogprob]]] = [[] for _ in who]
        rows = [self._row(w, 0, begins[w], draws=True) for w in who]
        seats = tuple(Seating(w, params[w], 0, BEGIN, begins[w]) for w in who)
        for position in range(BEGIN, LENGTH):
            result = self.built.runner.wait(self.built.runner.launch(StepPlan(tuple(rows), seatings=seats)))
            seats = ()
            for w in who:
                own = (result.logprobs[w] or ())[0]
                texts[w].append((result.tokens[w][0], own))
            rows = [self._row(w, position, (texts[w][-1][0],), draws=True, decodes=True) for w in who]
        return texts

    def read(self, texts: Sequence[tuple[int, ...]], chunk: int) -> list[list[TokenLogprob]]:
        """Return the likeliest tokens after each token of texts that are read together, from the beginning's end on."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
        found: list[list[TokenLogprob]] = [[] for _ in texts]
        seats = tuple(Seating(w, params, 0, LENGTH, text) for w, text in enumerate(texts))
        for start in range(0, LENGTH, chunk):
            own = [text[start : start + chunk] for text in texts]
            rows = tuple(
                self._row(w, start, tokens, targets=texts[w][start + 1 : start + 1 + len(tokens)])
                for w, tokens in enumerate(own)
            )
            result = self.built.runner.wait(self.built.runner.launch(StepPlan(rows, seatings=seats)))
            seats = ()
            for w, scores in result.scores.items():
                found[w] += scores
        return [each[BEGIN - 1 :] for each in found]

    def _row(
        self,
        who: int,
        start: int,
        tokens: tuple[int, ...],
        *,
        draws: bool = False,
        decodes: bool = False,
        targets: tuple[int, ...] = (),
    ) -> Row:
        kind = RowKind.DECODE if decodes else RowKind.PROMPT
        table = (tuple(range(1 + who * self.width, 1 + (who + 1) * self.width)),)
        return Row(kind, who, who, 0, start, tokens, table, draws, targets=targets)


class Counts:
    """The counts of a comparison with the written texts."""

    def __init__(self) -> None:
        self.differ, self.largest = 0, 0.0

    def add(self, written: TokenLogprob, other: TokenLogprob) -> None:
        """Count a position."""
        self.differ += written.top[0][0] != other.top[0][0]
        known = dict(written.top)
        self.largest = max([self.largest, *(abs(known[t] - p) for t, p in other.top if t in known)])

    def found(self) -> dict[str, float]:
        """Return the figures."""
        return {"differ": self.differ, "largest": self.largest}


def search(built: Built, positions: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield the figures repeatedly, each time for more positions."""
    reader, rng = Reader(built), np.random.default_rng(seed)
    counts = {way: Counts() for way in WAYS}
    done, count, changed = 0, 0, 0
    gaps: list[float] = []
    while done < positions:
        begins = [tuple(rng.integers(0, built.info.vocab_size, BEGIN).tolist()) for _ in range(ROWS)]
        seeds = rng.integers(0, 1 << 30, ROWS).tolist()
        written = reader.write(begins, seeds)
        again = [reader.write([begin], [own])[0] for begin, own in zip(begins, seeds, strict=True)]
        count += len(written)
        changed += sum([t for t, _ in x] != [t for t, _ in y] for x, y in zip(written, again, strict=True))
        texts = [(*begin, *(t for t, _ in own)) for begin, own in zip(begins, written, strict=True)]
        ways = {
            "together": reader.read(texts, LENGTH),
            "alone": [reader.read([text], LENGTH)[0] for text in texts],
            "chunked": [reader.read([text], CHUNK)[0] for text in texts],
        }
        for w, own in enumerate(written):
            for at, (_, likeliest) in enumerate(own[: LENGTH - BEGIN - 1]):
                gaps.append(likeliest.top[0][1] - likeliest.top[1][1])
                done += 1
                for way, scores in ways.items():
                    counts[way].add(likeliest, scores[w][at])
        largest = max(each.largest for each in counts.values())
        yield {
            "positions": done,
            "texts": count,
            "texts_differ": changed,
            "by_way": {way: each.found() for way, each in counts.items()},
            "gaps": {"closer_than_largest": sum(gap <= largest for gap in gaps), "smallest": min(gaps)},
        }


def main() -> None:
    """Run the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json-out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        folder = Path(options.model)
        if options.model == "demo":
            folder = Path(mlx_tandem.__file__).parent / "demo" / "base"
        elif options.model in SHAPES:
            folder = write_model(Path(scratch) / "model", SHAPES[options.model])
        config = EngineConfig(
            ModelConfig(path=str(folder), dtype=options.dtype),
            cache=CacheConfig(num_blocks=256),
            scheduler=SchedulerConfig(max_num_seqs=ROWS),
            lora=LoraConfig(max_loras=0),
            deterministic=options.deterministic,
        )
        built = build(config, {}, lambda *_: None)
    about = {"model": options.model, "seed": options.seed, "deterministic": options.deterministic}
    results = Results(options.json_out, device=backend.current().describe(), dtype=built.info.dtype, **about)
    for found in search(built, options.positions, options.seed):
        results.add(**found)
        print(found, flush=True)
    results.finish()


if __name__ == "__main__":
    main()

"""Four clients of Tinker's API that train at once, beside chats, compared with the same four one after the other.

    pip install tinker
    python benchmarks/tinker_clients.py --json-out benchmarks/results/tinker_clients.json

Each client has a session and a model of its own rank, and does the same number of passes and steps of the optimizer as
the others, through the SDK. In each round every client does its work while no other trains, and then all four do theirs
at once; which comes first changes from round to round. One chat after the other is answered all the time.

A device computes one thing at a time: four that take turns cannot have four times the speed of one that has it for
itself. `of_alone` is the time of the four alone, added up, over the time of the four at once, for the same work.
`slowest_over_fastest` is the longest time of one of the four at once over the shortest: near 1 where shares are fair.

Afterwards, without chats, weights are saved and sampled from after each of some steps: `save_ms` is the time until the
SDK has a sampler of the new weights, and `serve_ms` the time until it has the first token from them, from the same
start.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np
import tinker
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.outputs import argument

RANKS = (4, 8, 16, 32)
WANTED = 0.85
SAVE_WANTED_MS = 100.0


class Trainer:
    """One client with its model."""

    def __init__(self, url: str, rank: int, examples: int, length: int):
        """Begin a session, and a model of this rank, whose passes have so many examples of so many tokens."""
        self._service = tinker.ServiceClient(base_url=url, api_key=f"tml-rank-{rank}")
        self.model = self._service.create_lora_training_client(base_model="base", rank=rank, seed=rank).result()
        draw = np.random.default_rng(rank)
        rows = [draw.integers(10, 900, length + 1).tolist() for _ in range(examples)]
        self._data = [
            tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs=_inputs(row[1:]))
            for row in rows
        ]

    def train(self, steps: int) -> float:
        """Return the seconds of so many passes, each with its step. A pass is sent before the one before it is done."""
        began = perf_counter()
        ahead: list[Any] = []
        for _ in range(steps):
            ahead.append(self.model.forward_backward(self._data, "cross_entropy"))
            ahead.append(self.model.optim_step(tinker.AdamParams(learning_rate=1e-4)))
            while len(ahead) > 4:
                ahead.pop(0).result()
        for each in ahead:
            each.result()
        return perf_counter() - began

    def serve(self) -> tuple[float, float]:
        """Save the weights; return the milliseconds until there is a sampler, and until it has said a token."""
        prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
        began = perf_counter()
        sampler = self.model.save_weights_and_get_sampling_client().result()
        saved = perf_counter()
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1)).result()
        return 1e3 * (saved - began), 1e3 * (perf_counter() - began)


def _inputs(targets: list[int]) -> Any:
    return {"target_tokens": np.array(targets), "weights": np.ones(len(targets), np.float32)}


def chats(url: str, done: Event) -> tuple[int, float]:
    """Ask one question after the other until `done`; return the number of generated tokens, and the seconds."""
    began, tokens = perf_counter(), 0
    for i in itertools.count():
        if done.is_set():
            break
        asked = {"messages": [{"role": "user", "content": f"What is {i % 90} + 2?"}], "max_tokens": 16}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            tokens += json.load(reply)["usage"]["completion_tokens"]
    return tokens, perf_counter() - began


class Beside:
    """Chats that run while something else is done."""

    def __init__(self, url: str, threads: ThreadPoolExecutor):
        self._url, self._threads = url, threads

    def __enter__(self) -> Beside:
        self._done = Event()
        self._chats = self._threads.submit(chats, self._url, self._done)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        tokens, seconds = self._chats.result()
        self.tokens_per_s = round(tokens / seconds, 1)


class Round:
    """One round: all clients one after the other, and all at once, each way beside chats."""

    def __init__(self, url: str, clients: Mapping[int, Trainer], steps: int):
        """Prepare rounds of so many steps of each client."""
        self._url, self._clients, self._steps = url, clients, steps

    def figures(self, *, at_once_first: bool) -> dict[str, Any]:
        """Run the round and return its figures."""
        with ThreadPoolExecutor(len(self._clients) + 1) as threads:
            for way in (self._at_once, self._alone) if at_once_first else (self._alone, self._at_once):
                with Beside(self._url, threads) as chat:
                    way(threads, chat)
        alone, each = self.alone, self.each
        return {
            "alone_s": {str(rank): round(seconds, 3) for rank, seconds in alone.items()},
            "at_once_s": round(self.together, 3),
            "of_alone": round(sum(alone.values()) / self.together, 3),
            "slowest_over_fastest": round(max(each) / min(each), 3),
            "chat_tokens_per_s": {"alone": self.chat_alone.tokens_per_s, "at_once": self.chat_at_once.tokens_per_s},
        }

    def _alone(self, threads: ThreadPoolExecutor, chat: Beside) -> None:
        self.chat_alone = chat
        self.alone = {rank: client.train(self._steps) for rank, client in self._clients.items()}

    def _at_once(self, threads: ThreadPoolExecutor, chat: Beside) -> None:
        self.chat_at_once = chat
        began = perf_counter()
        self.each = list(threads.map(lambda client: client.train(self._steps), self._clients.values()))
        self.together = perf_counter() - began


def measure(url: str, args: argparse.Namespace, results: Results) -> None:
    """Add the figures of all rounds after the first, which warms up, and those of saving."""
    clients = {rank: Trainer(url, rank, args.examples, args.length) for rank in RANKS}
    work, rounds = Round(url, clients, args.steps), []
    for repeat in range(-1, args.repeats):
        figures = work.figures(at_once_first=bool(repeat % 2))
        if repeat >= 0:
            rounds.append(figures)
            print(figures, file=sys.stderr, flush=True)
            results.add(
                of_alone=statistics.median(each["of_alone"] for each in rounds),
                slowest_over_fastest=statistics.median(each["slowest_over_fastest"] for each in rounds),
                rounds=rounds,
            )
    served: list[tuple[float, float]] = []
    for i in range(args.saves + 1):
        client = clients[RANKS[i % len(RANKS)]]
        client.train(1)
        served.append(client.serve())
    for name, values in zip(("save_ms", "serve_ms"), zip(*served[1:], strict=True), strict=True):
        rounded = sorted(round(value, 1) for value in values)
        results.add(**{name: {"min": rounded[0], "median": round(statistics.median(rounded), 1), "max": rounded[-1]}})


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="four clients of Tinker's API at once")
    parser.add_argument("--steps", type=int, default=4, help="of each client in a round, each way")
    parser.add_argument("--examples", type=int, default=8, help="of a pass")
    parser.add_argument("--length", type=int, default=32, help="tokens of an example")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--saves", type=int, default=40)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, tinker=importlib.metadata.version("tinker"), ranks=RANKS)
    with tempfile.TemporaryDirectory(prefix="tandem-tinker-") as scratch:
        options = ("--enable-tinker", "--tinker-dir", scratch, "--tinker-trainers", str(len(RANKS)))
        with tandem(*options, "--tinker-rank", str(max(RANKS))).started(demo.MODEL_PATH) as server:
            measure(server.url, args, results)
    results.finish()
    found = results.found
    print(f"at once, of the sum of their speeds alone: {found['of_alone']} (wanted: {WANTED})")
    print(f"from saving to the first token: {found['serve_ms']['median']} ms (wanted: {SAVE_WANTED_MS:g})")


if __name__ == "__main__":
    main()

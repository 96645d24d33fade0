"""The parts of a load: which adapter each request asks for, the lengths of prompts and answers, and the sampling."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Literal

SAMPLING = [(t, p) for t in (0.0, 0.7, 1.0) for p in (1.0, 0.9)]
"""Pairs (temperature, top_p); neighbouring requests have different ones."""
GREEDY = (0.0, 1.0)
"""Temperature and top_p of greedy requests."""
Sampling = Literal["mixed", "greedy"]
"""How requests sample; with "mixed", neighbours differ."""
HOT_SHARE = 0.8
"""Share of the requests of `skew` that go to one adapter."""

LONGER = 4
"""Factor by which long-decode modes lengthen the answers and shorten the prompts."""

Choice = Callable[[], str | None]
"""Function that returns the adapter of the next request, None for the base."""


@dataclass(frozen=True)
class Load:
    """The load to send. Without `adapters`, those that the server lists are used."""

    url: str
    modes: tuple[str, ...] = ("base",)
    concurrency: tuple[int, ...] = (1, 8, 32)
    num_requests: int | None = None
    seconds: float | None = None
    rate: float | None = None  # requests per second, answered or not; `concurrency` bounds those under way
    prompt_tokens: int = 64
    max_tokens: int = 64
    sampling: Sampling = "mixed"
    repeats: int = 3
    adapters: tuple[str, ...] | None = None
    zipf_exponent: float = 1.0
    model: str | None = None
    endpoint: str = "completions"
    seeded: bool = True  # whether requests have seeds; some servers do not batch those
    profile: str | None = None  # "jan": a fixed set of requests replaces `modes` and `concurrency`
    validate: bool = False
    validation_sample: int | None = None  # most answers that are checked, chosen at random
    api_key: str = ""
    cacert: str | None = None  # file of certificates to trust at an https:// address


@dataclass(frozen=True)
class Workload:
    """One kind of requests. Without `sampling`, neighbours differ."""

    name: str
    choose: Choice
    prompt_tokens: int
    max_tokens: int
    sampling: tuple[float, float] | None = None


@dataclass(frozen=True)
class Phase:
    """Workloads that are measured in turn, round by round, with one number of requests under way."""

    concurrency: int
    workloads: tuple[Workload, ...]


def _cycle(adapters: Sequence[str]) -> Choice:
    numbers = count()
    return lambda: adapters[next(numbers) % len(adapters)]


def _skewed(adapters: Sequence[str]) -> Choice:
    """Return a choice that spreads the hot adapter's requests evenly, so that all parts of a round have the same
    mix.
    """
    cold = _cycle(adapters[1:] or adapters)
    numbers = count()

    def choose() -> str | None:
        n = next(numbers)
        return adapters[0] if int((n + 1) * HOT_SHARE) > int(n * HOT_SHARE) else cold()

    return choose


def zipf(adapters: Sequence[str], exponent: float, seed: int = 0) -> Choice:
    """Return a choice that asks for the k-th adapter in proportion to 1 / k^exponent; equal seeds give equal
    sequences.
    """
    ends = list(accumulate((k + 1) ** -exponent for k in range(len(adapters))))
    draw = random.Random(seed).random
    return lambda: adapters[min(bisect(ends, draw() * ends[-1]), len(adapters) - 1)]


MODES: dict[str, Callable[[Sequence[str], Load], Choice]] = {
    "base": lambda adapters, load: lambda: None,
    "same": lambda adapters, load: lambda: adapters[0],
    "mixed": lambda adapters, load: _cycle(adapters),
    "skew": lambda adapters, load: _skewed(adapters),
    "zipf": lambda adapters, load: zipf(adapters, load.zipf_exponent),
    "long-decode-same": lambda adapters, load: lambda: adapters[0],
    "long-decode-mixed": lambda adapters, load: _cycle(adapters),
}
"""Each mode's choice of adapters."""
BASELINES = {"mixed": "same", "skew": "same", "zipf": "same", "long-decode-mixed": "long-decode-same"}
"""The mode with which a mode's throughput is compared: one adapter, with prompts and answers of the same lengths."""


def with_baselines(modes: Sequence[str]) -> tuple[str, ...]:
    """Return the modes, each preceded by the mode that it is compared with."""
    return tuple(dict.fromkeys(m for mode in modes for m in (BASELINES.get(mode, mode), mode)))


def phases(load: Load, adapters: Sequence[str]) -> list[Phase]:
    """Return what is measured, in order."""
    if load.profile == "jan":
        return _jan(load)
    workloads = []
    sampling = GREEDY if load.sampling == "greedy" else None
    for mode in load.modes:
        factor = LONGER if mode.startswith("long-decode") else 1
        lengths = max(1, load.prompt_tokens // factor), load.max_tokens * factor
        workloads.append(Workload(mode, MODES[mode](adapters, load), *lengths, sampling))
    return [Phase(concurrency, tuple(workloads)) for concurrency in load.concurrency]


def _jan(load: Load) -> list[Phase]:
    """Return the profiles of Jan's mlx-server: three kinds one at a time, then the first of them 2, 4 and 8 at once."""
    kinds = [
        Workload(f"temp={t:g}, {n} tokens", lambda: None, load.prompt_tokens, n, (t, 1.0))
        for t, n in ((0.7, 50), (0.7, 100), (0.1, 50))
    ]
    return [Phase(1, tuple(kinds)), *(Phase(n, (kinds[0],)) for n in (2, 4, 8))]

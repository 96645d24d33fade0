"""What a load consists of: which adapter each request asks for, how long prompts and answers are, how they sample."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Literal

SAMPLING = [(t, p) for t in (0.0, 0.7, 1.0) for p in (1.0, 0.9)]
"""(temperature, top_p), a different pair for neighbouring requests."""
GREEDY = (0.0, 1.0)
Sampling = Literal["mixed", "greedy"]
"""mixed: neighbours differ."""
HOT_SHARE = 0.8  # of `skew`'s requests, to one adapter
LONGER = 4  # times the tokens of an answer in a long-decode mode, after a prompt shorter by as much

Choice = Callable[[], str | None]


@dataclass(frozen=True)
class Load:
    """What is sent. `adapters` None: those that the server lists."""

    url: str
    modes: tuple[str, ...] = ("base",)
    concurrency: tuple[int, ...] = (1, 8, 32)
    num_requests: int | None = None
    seconds: float | None = None
    rate: float | None = None  # requests per second whatever is answered; `concurrency` is then the most under way
    prompt_tokens: int = 64
    max_tokens: int = 64
    sampling: Sampling = "mixed"
    repeats: int = 3
    adapters: tuple[str, ...] | None = None
    zipf_exponent: float = 1.0
    model: str | None = None
    endpoint: str = "completions"
    seeded: bool = True  # some servers leave batching when a request has a seed
    profile: str | None = None  # "jan": its phases take the place of `modes` and `concurrency`
    validate: bool = False
    validation_sample: int | None = None  # at most so many answers are checked, chosen evenly
    api_key: str = ""


@dataclass(frozen=True)
class Workload:
    """One kind of requests. `sampling` None: neighbours differ."""

    name: str
    choose: Choice
    prompt_tokens: int
    max_tokens: int
    sampling: tuple[float, float] | None = None


@dataclass(frozen=True)
class Phase:
    """Workloads that are measured in turn, round by round, at one number of requests under way."""

    concurrency: int
    workloads: tuple[Workload, ...]


def _cycle(adapters: Sequence[str]) -> Choice:
    numbers = count()
    return lambda: adapters[next(numbers) % len(adapters)]


def _skewed(adapters: Sequence[str]) -> Choice:
    """The hot adapter's requests lie evenly among the others', so that no part of a round is another mix."""
    cold = _cycle(adapters[1:] or adapters)
    numbers = count()

    def choose() -> str | None:
        n = next(numbers)
        return adapters[0] if int((n + 1) * HOT_SHARE) > int(n * HOT_SHARE) else cold()

    return choose


def zipf(adapters: Sequence[str], exponent: float, seed: int = 0) -> Choice:
    """The k-th adapter is asked for in proportion to 1 / k^exponent; the same sequence for the same seed."""
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
BASELINES = {"mixed": "same", "skew": "same", "zipf": "same", "long-decode-mixed": "long-decode-same"}
"""What a mode's throughput is held against: one adapter, with prompts and answers of the same lengths."""


def with_baselines(modes: Sequence[str]) -> tuple[str, ...]:
    """The modes, each after what it is compared with."""
    return tuple(dict.fromkeys(m for mode in modes for m in (BASELINES.get(mode, mode), mode)))


def phases(load: Load, adapters: Sequence[str]) -> list[Phase]:
    """What is measured, in order."""
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
    """mlx-server's own profiles: three one at a time, then the first of them 2, 4 and 8 at once."""
    kinds = [
        Workload(f"temp={t:g}, {n} tokens", lambda: None, load.prompt_tokens, n, (t, 1.0))
        for t, n in ((0.7, 50), (0.7, 100), (0.1, 50))
    ]
    return [Phase(1, tuple(kinds)), *(Phase(n, (kinds[0],)) for n in (2, 4, 8))]

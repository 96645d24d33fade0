"""`tandem top` and `tandem status`: what a running server does now, live or once."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from mlx_tandem.cli import watching
from mlx_tandem.cli.demo import chart
from mlx_tandem.cli.live import Get, ServerGone, asking
from mlx_tandem.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType

HEALTH, METRICS, STATUS = "/health", "/v1/engine/metrics", "/v1/training/status"

ONCE_SECONDS = 0.5
"""Seconds between the two looks from whose difference a single picture has its rates."""

FORBIDDEN = 403
"""Status of an answer to a key that lacks the scope for it."""

NOT_READY = 503
"""Status of /health while no requests are accepted."""

RATES = 300
"""Rates that are remembered for the curve."""

HEIGHT = 3
"""Lines of the curve."""

BASE = "base"
"""Name of the base model among the adapters."""


@dataclass(frozen=True)
class AdapterLoad:
    """The current and the past work of an adapter or of the base."""

    open_requests: int
    requests: int
    tokens: int
    """Tokens of its answers that have ended."""


@dataclass(frozen=True)
class Look:
    """The state of a server. Everything but `health` is empty while its engine is not ready."""

    url: str
    health: Mapping[str, Any]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    learning: Mapping[str, Any] = field(default_factory=dict)
    loads: Mapping[str, AdapterLoad] = field(default_factory=dict)
    prompt_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0
    rates: Sequence[float] = ()
    """The last rates, of which this is the newest."""

    def data(self) -> dict[str, Any]:
        """Return what programs get."""
        engine = self.metrics.get("engine", {})
        health = {name: value for name, value in self.health.items() if name != "engine"}
        return {
            "url": self.url,
            **health,
            "running": engine.get("running", 0),
            "waiting": engine.get("waiting", 0),
            "used_blocks": engine.get("used_blocks", 0),
            "free_blocks": engine.get("free_blocks", 0),
            "requests_completed": self.metrics.get("requests_completed", 0),
            "prompt_tokens_per_s": round(self.prompt_tokens_per_s, 1),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "adapters": {name: load.__dict__ for name, load in self.loads.items()},
            "learning": dict(self.learning) or None,
        }


async def looks(url: str, key: str, interval: float, cacert: str | None) -> AsyncIterator[Look]:
    """Yield looks at a server again and again. Raises ServerGone. Rates are those since the look before."""
    before: Mapping[str, Any] = {}
    rates: deque[float] = deque(maxlen=RATES)
    at = 0.0
    async with asking(url, key, cacert, (NOT_READY,)) as get:
        while True:
            health = await get(HEALTH)
            if "model" not in health:  # a key without the scope is told the status only
                raise ServerGone(
                    f"{url} is {health['status']}, and says no more to this key, which lacks the scope metrics"
                )
            if "engine" not in health:
                before = {}
                yield Look(url, health)
            else:
                metrics, learning, now = await get(METRICS), await _learning(get), monotonic()
                engine, seconds = metrics["engine"], now - at
                prompts, rate = (_rate(engine, before, f"{kind}_tokens", seconds) for kind in ("prompt", "generated"))
                if before:
                    rates.append(rate)
                yield Look(url, health, metrics, learning, _loads(metrics), prompts, rate, tuple(rates))
                before, at = engine, now
            await asyncio.sleep(interval)


async def _learning(get: Get) -> Mapping[str, Any]:
    """Return the state of learning; nothing where there is none, or where the key lacks the scope training."""
    try:
        status = await get(STATUS)
    except ServerGone as e:
        if e.status != FORBIDDEN:
            raise
        return {}
    return status if status.get("training_enabled") else {}


async def once(url: str, key: str, cacert: str | None) -> Look:
    """Return one look at a server, with the rates of a short time. Raises ServerGone."""
    look = Look(url, {})
    async for look in looks(url, key, ONCE_SECONDS, cacert):
        if look.rates or not look.metrics:
            break
    return look


def _rate(now: Mapping[str, Any], before: Mapping[str, Any], name: str, seconds: float) -> float:
    """Return by how much a counter has grown per second; 0 where it began again or is seen for the first time."""
    return float(max(now[name] - before.get(name, now[name]), 0) / seconds)


def _loads(metrics: Mapping[str, Any]) -> dict[str, AdapterLoad]:
    """Return the load of the base and of each adapter's versions, the greatest first."""
    loads = {
        name: AdapterLoad(counters["open"], counters["requests"], counters["generated_tokens"])
        for name, counters in metrics["adapters"].items()
    }
    open_requests, ended = metrics["open_requests"], sum(metrics["finished"].values())
    others = list(loads.values())
    base = AdapterLoad(
        max(open_requests - sum(load.open_requests for load in others), 0),
        max(open_requests + ended - sum(load.requests for load in others), 0),
        max(metrics["generated_tokens"] - sum(load.tokens for load in others), 0),
    )
    by_load = sorted({BASE: base, **loads}.items(), key=lambda each: (each[1].open_requests, each[1].tokens))
    return dict(reversed(by_load))


def drawn(look: Look, console: Console, *, whole: bool = False) -> Group:
    """Return the picture of a server for a terminal, with as many adapters as fit on it, or all if it is `whole`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [line[: console.width] for line in _lines(look, console.width)]
    if look.rates:
        highest = max(*look.rates, 1.0)
        bars = [rate / highest for rate in look.rates]
        lines += chart.text(bars, width=console.width - 1, height=HEIGHT)
    table = Table(box=None, pad_edge=False)
    table.add_column("adapter", no_wrap=True, overflow="ellipsis")
    for title in ("open", "requests", "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    room = len(look.loads) if whole else max(console.height - len(lines) - 3, 1)
    for name, load in list(look.loads.items())[:room]:
        numbers = (f"{load.open_requests:,}", f"{load.requests:,}", f"{load.tokens:,}")
        table.add_row(printable(name), *numbers)
    below: list[RenderableType] = [Text(""), table] if look.loads else []
    return Group(*(Text(printable(line)) for line in lines), *below)


def _lines(look: Look, width: int) -> list[str]:
    """Return the lines above the curve."""
    health = look.health
    first = f"{look.url} · {health['model']} · {health['status'].replace('_', ' ')}"
    if "progress" in health:
        left = health["progress"].get("left_s")
        return [first, f"starting  {health['progress']['stage']}" + (f", {left:.0f} s left" if left else "")]
    if not look.metrics:
        return [first, *([f"error     {health['error']}"] if "error" in health else [])]
    engine, memory = look.metrics["engine"], health["memory"]
    used, blocks = engine["used_blocks"], engine["used_blocks"] + engine["free_blocks"]
    bar = round((width - 40) * used / blocks) if blocks and width > 60 else 0
    found = engine["prefix_hits"] / engine["prefix_queries"] if engine["prefix_queries"] else 0.0
    lines = [
        first,
        f"tokens    {look.tokens_per_s:,.0f}/s out, {look.prompt_tokens_per_s:,.0f}/s in",
        f"requests  {engine['running']} run, {engine['waiting']} wait, {look.metrics['requests_completed']:,} done",
        f"KV pool   {used:,} of {blocks:,} blocks {'█' * bar}".rstrip(),
        f"prefixes  {found:.0%} of prompts found there",
        f"memory    {memory['active'] / 1e9:.2f} GB of {memory['budget'] / 1e9:.2f} GB",
    ]
    if look.learning:
        lines += [f"learning  {watching.headline(look.learning)}", watching.guard(look.learning)]
        lines += watching.others(look.learning)
    return lines


def show_once(url: str, key: str, cacert: str | None, console: Console, as_json: bool) -> None:
    """Print one look at a server, for people or as JSON. Raises ServerGone."""
    look = asyncio.run(once(url, key, cacert))
    if as_json:
        print(json.dumps(look.data(), indent=2))
    else:
        console.print(drawn(look, console, whole=True))

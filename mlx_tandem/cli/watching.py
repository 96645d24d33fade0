"""`tandem learn watch`: asks a server again and again, and shows it on a screen, or in lines where there is none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mlx_tandem.cli.demo import chart
from mlx_tandem.cli.live import ServerGone, asking
from mlx_tandem.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

CURVES = {"mean_reward": "mean reward", "loss": "loss", "kl": "moved, nats"}
"""Numbers of updates that are drawn, with their titles."""

HEIGHT = 5
"""Lines of a curve."""

UPDATES, LEAST_UPDATES, SAMPLES = 6, 2, 3
"""The most and the fewest updates that are shown, and the most answers. The last ones are shown."""

ANSWER_LINES = 3
"""Most lines of an answer and its prompt."""

NUMBERS_WIDTH = 54
"""Columns of everything but the outcome in the table of updates."""

LEAST = 1 / (8 * HEIGHT)
"""Height of the bar of a number that is the lowest of the range: the thinnest that can be seen."""

_NUMBER = re.compile(r"[-+]?\d[\d.,e+-]*")

Data = Mapping[str, Any]

STATUS, HISTORY = "/v1/training/status", "/v1/training/history"
Look = tuple[Data, Data]
"""A look at a server: its status, and its history."""


async def looks(
    url: str, key: str, interval: float, cacert: str | None = None, adapter: str | None = None
) -> AsyncIterator[Look]:
    """Yield a server's status and history again and again. Raises Gone.

    `adapter` is the trained adapter that is watched; None means the server's default one. `cacert` is a file of
    certificates to trust, as in `Connection.to`.

    The history is requested only when the status says that something was learned since the last request.
    """
    query = "" if adapter is None else f"?adapter={quote(adapter, safe='')}"
    history: dict[str, Any] = {}
    seen: tuple[Any, ...] = ()
    async with asking(url, key, cacert) as get:
        while True:
            status = await get(STATUS + query)
            if not status.get("training_enabled"):
                raise ServerGone(f"{url} does not learn: start it with --enable-rl-training")
            now = (status["step"], status["updates"], status["rollbacks"], status["last_update"])
            if now != seen:
                history, seen = await get(HISTORY + query), now
            yield status, history
            await asyncio.sleep(interval)


class Lines:
    """Prints one line for each update, alarm and stop, for logs and pipes."""

    def __init__(self) -> None:
        self._printed: list[Any] = []
        self._said: dict[str, Any] = {}

    def show(self, look: Look) -> None:
        """Print what is new since the last call."""
        status, history = look
        if not self._said:
            for line in (headline(status), *others(status)):
                self._print(line)
        updates = history.get("updates", [])
        for update in updates[_overlap(self._printed, updates) :]:
            self._print(
                f"step {update['step']}   version {update['version'] or 'none'}   {outcome(update)}   "
                f"reward {update['mean_reward']:.3f}   "
                f"loss {update['loss']:.4g}   moved {update['kl']:.3g}"
            )
        self._printed = list(updates)
        for name in ("alarm", "reason", "advice"):
            # Advice whose numbers alone have changed is not said again.
            said = _NUMBER.sub("", status[name]) if name == "advice" else status[name]
            if said and self._said.get(name, "") != said:
                self._print(f"{name}: {status[name]}")
            self._said[name] = said

    def _print(self, text: str) -> None:
        print(printable(text), flush=True)


def drawn(look: Look, console: Console) -> Group:
    """Return the whole picture for a terminal, with as many updates and answers as fit on it."""
    from rich.console import Group
    from rich.text import Text

    status, history = look
    updates, width = history.get("updates", []), console.width
    lines = [headline(status), *others(status), guard(status)]
    lines += [f"{name}: {status[name]}" for name in ("alarm", "reason", "advice") if status[name]]
    if updates and updates[-1]["reason"]:
        lines.append(f"step {updates[-1]['step']}: {updates[-1]['reason']}")
    above = Group(
        *(Text(printable(line)) for line in lines),
        Text(""),
        *(Text(line) for line in curves(updates, width)),
        Text(""),
    )
    samples = [Text(answer(sample, width)) for sample in list(history.get("samples", []))[-SAMPLES:]]
    title = [Text(""), Text("answers that were learned from")]

    def left(count: int, answers: list[Text]) -> int:
        """Return how many lines remain with so many updates and these answers."""
        shown = Group(above, versions(updates[-count:], width), *(title if answers else []), *answers)
        return console.height - 1 - len(console.render_lines(shown, pad=False))

    while samples and left(LEAST_UPDATES, samples) < 0:
        samples.pop(0)
    count = next((n for n in range(UPDATES, LEAST_UPDATES, -1) if left(n, samples) >= 0), LEAST_UPDATES)
    return Group(above, versions(updates[-count:], width), *(title if samples else []), *samples)


def answer(sample: Data, width: int) -> str:
    """Return an answer that was learned from with its reward and its prompt.

    Both are whole if they fit into ANSWER_LINES lines; else the prompt is shortened first, and then the answer.
    """
    reward = "" if sample["reward"] is None else f"{sample['reward']:g} · "
    said, most = " ".join(sample["completion"].split()), ANSWER_LINES * (width - 1)
    prompt = _cut(sample["prompt"], max(most - len(reward) - len(said) - 5, width // 2))
    return _cut(f"{reward}{prompt} → {said}", most)


def headline(status: Data) -> str:
    """Return what is learned and how far it is, in one line."""
    doing = "learning" if status["busy"] else "waiting" if status["running"] else "stopped"
    if status["update_done"] is not None:
        doing = f"learning, {status['update_done']:.0%} of an update" + _left(status["update_left_s"])
    if status["recovering"]:
        doing = f"recovering {status['recovering']} updates"
    return (
        f"{status['current_lora']} · {doing} · {status['updates']} updates · step {status['step']} · "
        f"rate {status['learning_rate']:.2g} · {status['buffered']} answers wait"
    )


def others(status: Data) -> list[str]:
    """Return a line for each other adapter that the server trains, if the status has a list of them."""
    return [
        f"also {each['current_lora'] or each['adapter']} · {each['updates']} updates · "
        f"reward {each['mean_reward']:.3f} · watch it with: tandem learn watch {each['adapter']}"
        for each in status.get("adapters", ())
        if each["adapter"] != status["adapter"]
    ]


def guard(status: Data) -> str:
    """Return what the guard knows, in one line."""
    if not status["accepted"]:
        found = "no version is accepted yet"
    elif status["compared"]:
        found = (
            f"version {status['accepted']} is accepted; later ones got {status['difference']:+.3f} on "
            f"{status['compared']} prompts"
        )
    else:
        found = f"version {status['accepted']} is accepted"
    shown = f"{status['gain']:+.3f}" if status["gain"] else "none is shown so far"
    gain = "" if status["gain"] is None else f"; gain: {shown}"
    return f"guard: {found}{gain}; {status['rollbacks']} rollbacks"


def _left(seconds: float | None) -> str:
    """Return how long something still takes, in words to be appended."""
    if seconds is None:
        return ""
    return f", {seconds:.0f} s left" if seconds < 120 else f", {seconds / 60:.0f} min left"


def curves(updates: Sequence[Data], width: int) -> list[str]:
    """Return the curves beside each other. Above each curve are its last value and its range, which includes 0."""
    each = (width + 1) // len(CURVES) - 2
    columns = []
    for name, title in CURVES.items():
        values = [float(update[name]) for update in updates][-each:]
        low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)  # bars begin at 0
        scaled = [max((value - low) / (high - low or 1.0), LEAST) for value in values]
        said = f"{title} {values[-1]:.3g}" if values else title
        spread = f"{low:.3g} … {high:.3g}" if values else "no update yet"
        bars = chart.text(scaled, width=each, height=HEIGHT)
        columns.append([said[:each].ljust(each), spread[:each].ljust(each), *bars])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def versions(updates: Sequence[Data], width: int) -> Table:
    """Return a table of updates for a terminal of `width` columns, the newest first, with a line for each."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("step", "version", "outcome"):
        table.add_column(title, no_wrap=True)
    for title in ("reward", "loss", "moved", "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    for update in reversed(updates):
        numbers = (
            f"{update['mean_reward']:.3f}",
            f"{update['loss']:.3g}",
            f"{update['kl']:.2g}",
            str(update["tokens"]),
        )
        table.add_row(
            str(update["step"]), str(update["version"] or ""), _cut(outcome(update), width - NUMBERS_WIDTH), *numbers
        )
    return table


def outcome(update: Data) -> str:
    """Return how an update ended, with the reason if there is one."""
    said = str(update["outcome"]).replace("_", " ")
    return f"{said}: {update['reason']}" if update["reason"] else said


def _overlap(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Return how many of the entries in `now` end `before`: a history loses entries at its beginning only."""
    return next((n for n in range(min(len(before), len(now)), 0, -1) if list(before[-n:]) == list(now[:n])), 0)


def _cut(text: str, most: int) -> str:
    return printable(" ".join(text.split()), max(most, 8))

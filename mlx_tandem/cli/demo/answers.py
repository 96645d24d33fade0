"""`tandem demo`: shows the built-in model and its adapters answering the same questions in one batch of a real
server.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlx_tandem.cli.console import output
from mlx_tandem.cli.own_server import ROOM, started_server
from mlx_tandem.http_client import Connection, Events, HttpError

BASE = "base"
"""Name of the base model."""

STORIES = ("a fox", "a bear", "a cat")
SHORT = (
    ("Sort down: 3 9 1 7 5", "Sort down: 8 2 6 4 0", "Sort down: 2 2 8 5"),  # which the base does wrongly
    ("What is 17 + 25?", "What is 58 + 64?", "What is 9 + 86?"),
    ("Reverse: garden", "Count from 3 to 7.", "Reverse: window"),
)
"""Questions whose answers fit into half a line of 80 columns, by place on the screen."""

MAX_TOKENS = 200
"""Most tokens of an answer."""

HOLD_SECONDS = 0.7
"""Seconds for which all answers to a question stay before the next one takes their place."""

LINES = 3
"""Lines of a short question and its answers on a terminal of 80 columns."""

OTHER_LINES = 21
"""Lines of everything else on that terminal: the rates, a story by each model, the summary, and the cursor."""


@dataclass
class Cell:
    """One answer while it arrives."""

    text: str = ""
    running: bool = False
    error: str | None = None


@dataclass
class Place:
    """A place on the screen, where one question after the other is asked. All models answer it at the same time."""

    questions: Sequence[str]
    is_long: bool = False  # whether each answer has lines of its own
    question: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)  # by model

    def ask(self, question: str, models: Sequence[str]) -> None:
        """Replace the answers by empty ones to a new question."""
        self.question, self.cells = question, {model: Cell() for model in models}


@dataclass
class Board:
    """The contents of the screen: the rates, and places with questions and the answers of each model."""

    models: list[str]
    places: list[Place]
    tokens: int = 0
    answers: int = 0
    most_at_once: int = 0
    adapters_at_once: int = 0
    best: int = 0  # most tokens that arrived within a second
    _recent: deque[tuple[float, int]] = field(default_factory=deque)  # (time, tokens) of the last second

    def arrived(self, tokens: int) -> None:
        """Count tokens that have arrived."""
        self.tokens += tokens
        self._recent.append((perf_counter(), tokens))
        self.best = max(self.best, self.rate())

    def rate(self) -> int:
        """Return how many tokens arrived in the last second."""
        since = perf_counter() - 1.0
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()
        return sum(tokens for _, tokens in self._recent)

    def cells(self) -> Iterator[tuple[str, str, Cell]]:
        """Yield the answers on the screen, as (question, model, answer)."""
        for place in self.places:
            for model, cell in place.cells.items():
                yield place.question, model, cell

    def running(self) -> list[str]:
        """Count the answers under way, and return the model of each."""
        models = [model for _, model, cell in self.cells() if cell.running]
        self.most_at_once = max(self.most_at_once, len(models))
        self.adapters_at_once = max(self.adapters_at_once, len({*models} - {BASE}))
        return models

    def drawn(self) -> RenderableType:
        """Return the board for rich to draw. The longest answers are the last, since they may not fit on the screen."""
        width = max(map(len, self.models))
        parts: list[RenderableType] = [self._rates()]
        for place in self.places:
            table = Table.grid(padding=(0, 2, 0, 0), expand=True)
            columns = 1 if place.is_long else 2
            for _ in range(columns):
                table.add_column(width=width + 2, style="cyan")
                table.add_column(ratio=1)
            pairs = [(f"  {model}", _shown(cell)) for model, cell in place.cells.items()]
            for i in range(0, len(pairs), columns):
                table.add_row(*(part for pair in pairs[i : i + columns] for part in pair))
            parts += [Text(place.question, style="bold"), table]
        return Group(*parts)

    def _rates(self) -> Text:
        running = self.running()
        if not running:
            return Text(f"{self.best:,} tokens/s at best", style="bold green")
        answers = "1 answer" if len(running) == 1 else f"{len(running)} answers"
        return Text.assemble(
            (f"{self.rate():,} tokens/s", "bold green"),
            f", {self.best:,} at best   {answers} in one batch: {', '.join(dict.fromkeys(running))}",
        )


def places(rows: int | None = None) -> list[Place]:
    """Return the places for a terminal with so many rows: as many short questions as fit beside the stories.

    If the number of rows is unknown, return all places.
    """
    most = len(SHORT) if rows is None else (rows - OTHER_LINES) // LINES
    count = min(max(most, 1), len(SHORT))
    stories = tuple(f"Tell me a short story about {animal}." for animal in STORIES)
    return [*(Place(questions) for questions in SHORT[:count]), Place(stories, is_long=True)]


def demo(seconds: float) -> None:
    """Run the demo live on a terminal, or as plain lines elsewhere."""
    console = output()
    with started_server(*ROOM) as url:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=12, vertical_overflow="crop") as live:
                shown = places(console.height)
                board = asyncio.run(ask(url, seconds, shown, lambda board: live.update(board.drawn())))
        else:
            printed: set[tuple[str, str]] = set()
            board = asyncio.run(ask(url, seconds, places(), lambda board: _print_new(board, printed)))
        console.print(asyncio.run(summary(url, board)), soft_wrap=not console.is_terminal, highlight=False)


def _shown(cell: Cell) -> Text:
    return Text(cell.error or cell.text + ("▍" if cell.running else ""), style="red" if cell.error else "")


def _print_new(board: Board, printed: set[tuple[str, str]]) -> None:
    """Print each answer once when it is complete; a question that is asked again is not repeated."""
    for question, model, cell in board.cells():
        if (question, model) not in printed and not cell.running and (cell.text or cell.error):
            printed.add((question, model))
            print(f"{question}  [{model}]  {cell.error or cell.text}", flush=True)


async def ask(url: str, seconds: float, shown: list[Place], update: Callable[[Board], Any]) -> Board:
    """Ask one question after the other in each place for `seconds`, and wait for the last answers.

    `update` is called about ten times a second, and whenever all answers to a question are there.
    """
    connection = Connection.to(url)
    _, listing = await connection.json("GET", "/v1/adapters")
    connection.close()
    board = Board([BASE, *(entry["name"] for entry in listing["adapters"])], shown)
    until = perf_counter() + seconds

    async def fill(place: Place) -> None:
        asked = 0
        while not asked or perf_counter() < until:
            place.ask(place.questions[asked % len(place.questions)], board.models)
            asked += 1
            await asyncio.gather(*(_answer(url, board, place, model) for model in board.models))
            update(board)
            await asyncio.sleep(HOLD_SECONDS)

    async def show() -> None:
        while True:
            update(board)
            await asyncio.sleep(0.08)

    showing = asyncio.create_task(show())
    try:
        await asyncio.gather(*(fill(place) for place in shown))
    finally:
        showing.cancel()
    update(board)
    return board


async def _answer(url: str, board: Board, place: Place, model: str) -> None:
    cell = place.cells[model]

    def on_data(data: str) -> None:
        if data == "[DONE]":
            return
        event = json.loads(data)
        if error := event.get("error"):
            cell.error = str(error.get("message"))
        for choice in event.get("choices", ()):
            cell.text += choice["delta"].get("content") or ""
            board.arrived(len(choice.get("token_ids") or ()))

    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": place.question}],
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "return_token_ids": True,
    }
    if model != BASE:
        body["model"] = model
    connection = Connection.to(url)
    cell.running = True
    board.running()
    try:
        status = await connection.request("POST", "/v1/chat/completions", body, Events(on_data))
        if status != 200:
            cell.error = f"status {status}"
    except HttpError as e:
        cell.error = str(e)
    finally:
        cell.running = False
        board.answers += 1
        connection.close()


async def summary(url: str, board: Board) -> str:
    """Return one sentence about the run, with the engine's own count of rows per step."""
    connection = Connection.to(url)
    _, metrics = await connection.json("GET", "/v1/engine/metrics")
    connection.close()
    engine = metrics["engine"]
    rows = engine["rows"] / engine["steps"] if engine["steps"] else 0.0
    return (
        f"{board.answers} answers, {board.tokens:,} tokens; at most {board.most_at_once} at once, of the base and "
        f"{board.adapters_at_once} adapters; {rows:.1f} rows in a step on average."
    )

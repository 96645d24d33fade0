"""`tandem demo`: shows the built-in model and its adapters answering the same questions in one batch of a real
server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlx_tandem.cli.demo.server import started_server
from mlx_tandem.cli.http import Connection, Events, HttpError

BASE = "base"
"""Name of the base model."""

# The base sorts down wrongly, so that in each round the adapter `down` gives another answer to one question.
ROUNDS = (
    ("What is 17 + 25?", "Sort down: 3 9 1 7 5", "What is the capital of Peru?", "Tell me a short story about a fox."),
    ("What is 58 + 64?", "Sort down: 8 2 6 4 0", "Reverse: garden", "Tell me a short story about a bear."),
    ("What is 9 + 86?", "Sort down: 2 2 8 5", "Who are you?", "Tell me a short story about a cat."),
)
MAX_TOKENS = 200
"""Most tokens of an answer."""


@dataclass
class Cell:
    """One answer while it arrives."""

    text: str = ""
    running: bool = False
    error: str | None = None


@dataclass
class Board:
    """The contents of the screen: a row per question, a column per model, and the rates."""

    models: list[str]
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)  # (question, model)
    tokens: int = 0
    answers: int = 0
    most_at_once: int = 0
    adapters_at_once: int = 0
    _recent: deque[float] = field(default_factory=deque)

    def start_round(self, questions: tuple[str, ...]) -> None:
        """Replace the cells by those of new questions."""
        self.cells = {(question, model): Cell() for question in questions for model in self.models}

    def token(self) -> None:
        """Count a token that has arrived."""
        self.tokens += 1
        self._recent.append(perf_counter())

    def rate(self) -> float:
        """Return how many tokens arrived in the last second."""
        now = perf_counter()
        while self._recent and self._recent[0] < now - 1.0:
            self._recent.popleft()
        return float(len(self._recent))

    def running(self) -> list[str]:
        """Count the answers under way, and return the model of each."""
        models = [model for (_, model), cell in self.cells.items() if cell.running]
        self.most_at_once = max(self.most_at_once, len(models))
        self.adapters_at_once = max(self.adapters_at_once, len({*models} - {BASE}))
        return models

    def table(self) -> RenderableType:
        """Return the board for rich to draw."""
        running = self.running()
        table = Table(expand=True, show_lines=True)
        table.add_column("question", ratio=2, style="bold")
        for model in self.models:
            table.add_column(model, ratio=3)
        for question in dict.fromkeys(question for question, _ in self.cells):
            shown = []
            for model in self.models:
                cell = self.cells[question, model]
                text = cell.error or cell.text + ("▍" if cell.running else "")
                shown.append(Text(text, style="red" if cell.error else ""))
            table.add_row(question, *shown)
        rate = Text.assemble((f"{self.rate():,.0f} tokens/s", "bold green"))
        if running:
            answers = "1 answer" if len(running) == 1 else f"{len(running)} answers"
            rate.append(f"   {answers} under way in one batch: {', '.join(dict.fromkeys(running))}")
        return Group(rate, table)  # the rate comes first, since the end of a long table may not fit on the screen


def demo(seconds: float) -> None:
    """Run the demo live on a terminal, or as plain lines elsewhere."""
    console = Console()
    with started_server() as url:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=12, transient=False) as live:
                board = asyncio.run(ask(url, seconds, lambda board: live.update(board.table())))
        else:
            shown: set[tuple[str, str]] = set()
            board = asyncio.run(ask(url, seconds, lambda board: _print_new(board, shown)))
        console.print(asyncio.run(summary(url, board)), soft_wrap=not console.is_terminal, highlight=False)


def _print_new(board: Board, shown: set[tuple[str, str]]) -> None:
    """Print each answer once when it is complete; a question of an earlier round is not repeated."""
    for key, cell in board.cells.items():
        if key not in shown and not cell.running and (cell.text or cell.error):
            shown.add(key)
            question, model = key
            print(f"{question}  [{model}]  {cell.error or cell.text}", flush=True)


async def ask(url: str, seconds: float, update: Callable[[Board], Any]) -> Board:
    """Ask round after round for `seconds`, finishing the last one; `update` is called about ten times a second."""
    connection = Connection.to(url)
    _, listing = await connection.json("GET", "/v1/adapters")
    connection.close()
    board = Board([BASE, *(entry["name"] for entry in listing["adapters"])])
    until = perf_counter() + seconds

    async def show() -> None:
        while True:
            update(board)
            await asyncio.sleep(0.08)

    showing = asyncio.create_task(show())
    try:
        for questions in itertools.cycle(ROUNDS):
            board.start_round(questions)
            await asyncio.gather(*(_answer(url, board, question, model) for question, model in board.cells))
            update(board)
            if perf_counter() >= until:
                return board
            await asyncio.sleep(0.5)
    finally:
        showing.cancel()
    raise AssertionError("the rounds do not end by themselves")


async def _answer(url: str, board: Board, question: str, model: str) -> None:
    cell = board.cells[question, model]

    def on_data(data: str) -> None:
        if data == "[DONE]":
            return
        event = json.loads(data)
        if error := event.get("error"):
            cell.error = str(error.get("message"))
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                cell.text += text
                board.token()

    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
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

"""The store of feedback in `learning.db`. What it has acknowledged survives a crash and a loss of power."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from mlx_tandem.config import FeedbackConfig
from mlx_tandem.training.feedback.opinions import Feedback, Stored
from mlx_tandem.training.store.database import Database, Statement
from mlx_tandem.training.store.on_use import DatabaseOnUse
from mlx_tandem.training.store.records import seal
from mlx_tandem.training.store.saved import unsealed

MOST_BYTES = 1 << 30
"""Most bytes of all feedback in the store; the oldest goes first."""

COLUMNS = "number, learned, body"


def read(database: Database, number: int, learned: int, body: bytes) -> Stored:
    """Return the feedback of a row, which has COLUMNS. Raises StorageError."""
    return Stored(number, learned, unsealed(database, body, Feedback, f"feedback {number}"))


class FeedbackStore:
    """The feedback of one server. It belongs to one event loop."""

    def __init__(self, config: FeedbackConfig, database: DatabaseOnUse):
        """Begin without touching the drive."""
        self._most = config.keep
        self._database = database
        self._turn = asyncio.Lock()
        self._bytes: int | None = None  # of all feedback; None: not counted yet

    async def add(self, feedback: Sequence[Feedback]) -> None:
        """Keep feedback, in place of what was said of the same choices before; it is on the drive when this returns.

        Raises StorageError, and EngineUnavailable while the learner's database is not open.
        """
        async with self._turn:
            await asyncio.to_thread(self._add, await self._database.open(), feedback)

    async def page(self, after: int | None, limit: int, *, newest_first: bool) -> list[Stored]:
        """Return the next feedback after the one with the number `after`, or the first of all. Raises StorageError."""
        async with self._turn:
            if not self._database.exists:
                return []
            database = await self._database.open()
        way, order = ("<", "DESC") if newest_first else (">", "ASC")
        where, values = ("", ()) if after is None else (f"WHERE number {way} ? ", (after,))
        sql = f"SELECT {COLUMNS} FROM feedback {where}ORDER BY number {order} LIMIT ?"
        return await asyncio.to_thread(_read, database, sql, *values, limit)

    async def due(self, adapters: Sequence[str], epochs: int, limit: int) -> list[Stored]:
        """Return feedback on these adapters that fewer than `epochs` updates learned from, the least learned first and
        of these the oldest. Raises StorageError.
        """
        return await self._some(adapters, "learned < ?", "learned, number", epochs, limit)

    async def learned(self, adapters: Sequence[str], epochs: int, limit: int) -> list[Stored]:
        """Return the newest feedback on these adapters that `epochs` updates learned from. Raises StorageError."""
        return await self._some(adapters, "learned >= ?", "number DESC", epochs, limit)

    async def pass_over(self, feedback: Sequence[Stored], epochs: int) -> None:
        """Note that nothing can be learned from this feedback: it is not due any more. Raises StorageError."""
        sql = "UPDATE feedback SET learned = ? WHERE number = ?"
        async with self._turn:
            database = await self._database.open()
            await asyncio.to_thread(database.write, [(sql, (epochs, each.number)) for each in feedback])

    async def _some(self, adapters: Sequence[str], where: str, order: str, epochs: int, limit: int) -> list[Stored]:
        async with self._turn:
            database = await self._database.open()
        places = ", ".join("?" * len(adapters))
        sql = f"SELECT {COLUMNS} FROM feedback WHERE {where} AND adapter IN ({places}) ORDER BY {order} LIMIT ?"
        return await asyncio.to_thread(_read, database, sql, epochs, *adapters, limit)

    def _add(self, database: Database, feedback: Sequence[Feedback]) -> None:
        if self._bytes is None:
            self._bytes = int(database.rows("SELECT coalesce(sum(length(body)), 0) FROM feedback")[0][0])
        statements: list[Statement] = []
        for each in feedback:
            if _is_said_again(database, each):
                continue
            body = seal(each)
            self._bytes += len(body)
            sql = "INSERT OR REPLACE INTO feedback (completion, choice, adapter, body) VALUES (?, ?, ?, ?)"
            statements.append((sql, (each.completion, each.choice, each.adapter, body)))
        sql = "DELETE FROM feedback WHERE number <= (SELECT number FROM feedback ORDER BY number DESC LIMIT 1 OFFSET ?)"
        statements.append((sql, (self._most,)))
        if self._bytes > MOST_BYTES:
            sums = "SELECT number, sum(length(body)) OVER (ORDER BY number DESC) AS total FROM feedback"
            sql = f"DELETE FROM feedback WHERE number IN (SELECT number FROM ({sums}) WHERE total > ?)"
            statements.append((sql, (MOST_BYTES * 9 // 10,)))
            self._bytes = None  # Counted again next time.
        database.write(statements)


def _read(database: Database, sql: str, *values: Any) -> list[Stored]:
    """Return the feedback that a query of COLUMNS finds. Raises StorageError."""
    return [read(database, *row) for row in database.rows(sql, *values)]


def _is_said_again(database: Database, feedback: Feedback) -> bool:
    """Return whether the same was said of the completion before: it need not be learned again."""
    sql = f"SELECT {COLUMNS} FROM feedback WHERE completion = ? AND choice = ?"
    for row in database.rows(sql, feedback.completion, feedback.choice):
        known = read(database, *row).feedback
        return replace(known, created=feedback.created) == feedback
    return False


def learned_once_more(feedback: Sequence[Stored]) -> list[Statement]:
    """Return the statements that note one more update for each feedback. Repeating them changes nothing."""
    return [("UPDATE feedback SET learned = ? WHERE number = ?", (each.learned + 1, each.number)) for each in feedback]

"""The folder of batches: their files, and the database of what became of each request.

What a method has written when it returns survives a crash and a loss of power. Every call may wait for the drive and
raise StorageError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from mlx_tandem import files
from mlx_tandem.dialects.batches.records import Batch, FileRecord, LineOutcome
from mlx_tandem.training.store.database import Database, Statement

NAME = "batches.db"

MIGRATIONS = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, -- higher: newer
        id TEXT NOT NULL UNIQUE,            -- also the name of the file beside this one
        bytes INTEGER NOT NULL,
        body BLOB NOT NULL                  -- JSON
    );
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT, -- higher: newer
        id TEXT NOT NULL UNIQUE,
        ended INTEGER NOT NULL DEFAULT 0,   -- 1: nothing more becomes of it
        owner TEXT NOT NULL,                -- the tenant
        body BLOB NOT NULL                  -- JSON
    );
    CREATE INDEX batches_to_run ON batches (number) WHERE ended = 0;
    CREATE TABLE outcomes (
        batch TEXT NOT NULL,
        line INTEGER NOT NULL,              -- of the requests, from 0 on
        succeeded INTEGER NOT NULL,
        text BLOB NOT NULL,                 -- a line of the file of answers or of errors
        PRIMARY KEY (batch, line)
    ) WITHOUT ROWID;
    """,
)

MOST_BATCHES = 1000
"""Most batches that are remembered; the oldest that have ended go first."""


class BatchStore:
    """The open folder of batches, which no other process can open."""

    def __init__(self, folder: Path):
        """Take the folder, and remove files that no row names: an earlier process ended while it wrote them."""
        self.folder = folder
        with files.storage(folder):
            files.make_folder(folder)
            files.make_folder(folder / "files")
            self._lock = files.FolderLock(folder)
        try:
            self._database = Database.open(folder, self._lock.held, name=NAME, migrations=MIGRATIONS)
            known = {id for (id,) in self._database.rows("SELECT id FROM files")}
            with files.storage(folder):
                for name in os.listdir(folder / "files"):
                    if name not in known:
                        os.unlink(folder / "files" / name)
        except BaseException:
            self._lock.release()
            raise

    @staticmethod
    def exists(folder: Path) -> bool:
        """Return whether a folder has anything in it."""
        return (folder / NAME).exists()

    def close(self) -> None:
        """Close the database and give the folder back."""
        self._database.close()
        self._lock.release()

    # -- files --------------------------------------------------------------------------------------------------

    def path(self, id: str) -> Path:
        """Return the place of a file."""
        return self.folder / "files" / id

    def used(self) -> tuple[int, int]:
        """Return the number of files, and the bytes of all files and outcomes."""
        number, size = self._database.rows("SELECT count(*), coalesce(sum(bytes), 0) FROM files")[0]
        return int(number), int(size) + self.outcome_bytes()

    def outcome_bytes(self) -> int:
        """Return the bytes of the outcomes of batches that run."""
        return int(self._database.rows("SELECT coalesce(sum(length(text)), 0) FROM outcomes")[0][0])

    def add_file(self, record: FileRecord, content: bytes) -> None:
        """Keep a file."""
        self._write(record.id, content)
        self._database.write([_file(record)])

    def file(self, id: str) -> FileRecord | None:
        """Return what is known of a file; None if there is none with this id."""
        found = self._database.rows("SELECT body FROM files WHERE id = ?", id)
        return msgspec.json.decode(found[0][0], type=FileRecord) if found else None

    def files(self) -> list[FileRecord]:
        """Return all files, the newest first."""
        rows = self._database.rows("SELECT body FROM files ORDER BY number DESC")
        return [msgspec.json.decode(body, type=FileRecord) for (body,) in rows]

    def remove_file(self, id: str) -> None:
        """Remove a file."""
        self._database.write([("DELETE FROM files WHERE id = ?", (id,))])
        with files.storage(self.path(id)):
            self.path(id).unlink(missing_ok=True)

    def _write(self, id: str, content: bytes | Iterator[bytes]) -> int:
        """Write a file, and return its size in bytes."""
        path = self.path(id)
        with files.storage(path):
            path.unlink(missing_ok=True)
            files.create(path, content)
            files.sync_folder(path.parent)
            return path.stat().st_size

    # -- batches ------------------------------------------------------------------------------------------------

    def put(self, batch: Batch) -> None:
        """Write a batch in place of its earlier record, if there is one."""
        self._database.write([_batch(batch), _forget_old()])

    def batch(self, id: str) -> Batch | None:
        """Return a batch; None if there is none with this id."""
        found = self._database.rows("SELECT body FROM batches WHERE id = ?", id)
        return msgspec.json.decode(found[0][0], type=Batch) if found else None

    def page(self, after: str | None, limit: int, owner: str | None = None) -> list[Batch]:
        """Return the next batches after the one with the id `after`, or the first of all, the newest first.

        owner: only this tenant's; None: everybody's.
        """
        rows = self._database.rows(
            "SELECT body FROM batches WHERE (?1 IS NULL OR number < (SELECT number FROM batches WHERE id = ?1)) "
            "AND (?2 IS NULL OR owner = ?2) ORDER BY number DESC LIMIT ?3",
            *(after, owner, limit),
        )
        return [msgspec.json.decode(body, type=Batch) for (body,) in rows]

    def unfinished(self) -> list[Batch]:
        """Return the batches that have not ended, the oldest first."""
        rows = self._database.rows("SELECT body FROM batches WHERE ended = 0 ORDER BY number")
        return [msgspec.json.decode(body, type=Batch) for (body,) in rows]

    # -- outcomes -----------------------------------------------------------------------------------------------

    def done(self, batch: str) -> dict[int, bool]:
        """Return the lines of a batch that have an outcome, and whether they succeeded."""
        rows = self._database.rows("SELECT line, succeeded FROM outcomes WHERE batch = ?", batch)
        return {line: bool(succeeded) for line, succeeded in rows}

    def add(self, batch: Batch, outcomes: Sequence[LineOutcome]) -> None:
        """Keep outcomes of requests, and the batch, which counts them. A request that has one keeps it."""
        sql = "INSERT OR IGNORE INTO outcomes (batch, line, succeeded, text) VALUES (?, ?, ?, ?)"
        rows: list[Statement] = [(sql, (batch.id, o.line, int(o.succeeded), o.text)) for o in outcomes]
        self._database.write([*rows, _batch(batch)])

    def end(self, batch: Batch, output: FileRecord, errors: FileRecord) -> None:
        """Write the files of answers and of errors, each if there are any, and end the batch: all of it or nothing."""
        statements: list[Statement] = []
        for record, succeeded in ((output, 1), (errors, 0)):
            if not self._database.rows(
                "SELECT 1 FROM outcomes WHERE batch = ? AND succeeded = ? LIMIT 1", batch.id, succeeded
            ):
                continue
            size = self._write(record.id, self._texts(batch.id, succeeded))
            statements.append(_file(msgspec.structs.replace(record, size=size)))
            if succeeded:
                batch.output = record.id
            else:
                batch.errors = record.id
        clear: Statement = ("DELETE FROM outcomes WHERE batch = ?", (batch.id,))
        self._database.write([*statements, clear, _batch(batch)])

    def _texts(self, batch: str, succeeded: int) -> Iterator[bytes]:
        """Yield the lines of a file of answers or of errors, in the order of the requests."""
        sql = "SELECT text FROM outcomes WHERE batch = ? AND succeeded = ? ORDER BY line"
        for (text,) in self._database.each(sql, batch, succeeded):
            yield bytes(text) + b"\n"


def _file(record: FileRecord) -> Statement:
    """Return the statement that keeps a file."""
    sql = "INSERT OR REPLACE INTO files (id, bytes, body) VALUES (?, ?, ?)"
    return sql, (record.id, record.size, msgspec.json.encode(record))


def _batch(batch: Batch) -> Statement:
    """Return the statement that keeps a batch."""
    sql = (
        "INSERT INTO batches (id, ended, owner, body) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET ended = excluded.ended, body = excluded.body"
    )
    return sql, (batch.id, int(batch.has_ended), batch.owner, msgspec.json.encode(batch))


def _forget_old() -> Statement:
    """Return the statement that forgets the oldest batches that have ended, if there are too many."""
    newest = "SELECT number FROM batches ORDER BY number DESC LIMIT ?"
    return f"DELETE FROM batches WHERE ended = 1 AND number NOT IN ({newest})", (MOST_BATCHES,)

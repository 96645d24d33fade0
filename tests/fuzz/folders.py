"""Folders as plain data: files with their bytes, and things that are no files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from tests.fuzz import raw

Thing = Literal["pipe", "folder", "socket", "nothing", "loop", "dangling", "zeros", "link"]
THINGS: tuple[Thing, ...] = ("pipe", "folder", "socket", "nothing", "loop", "dangling", "zeros", "link")


@dataclass
class Change:
    """What is wrong: in which file, and under which names in it, of which a refusal has one; none: it has no name."""

    file: str
    names: tuple[str, ...] = ()


@dataclass
class Case:
    """A folder and what was changed in it."""

    files: dict[str, bytes | Thing]
    changes: list[Change] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Make `folder` hold exactly this."""
        folder.mkdir(exist_ok=True)
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                entry.rmdir()
            else:
                entry.unlink()
        for name, content in self.files.items():
            path = folder / name
            match content:
                case bytes():
                    path.write_bytes(content)
                case "pipe":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()
                case "socket":
                    _make_socket(path)
                case "loop":
                    path.symlink_to(name)
                case "dangling":
                    path.symlink_to("not-there")
                case "zeros":
                    path.symlink_to("/dev/zero")
                case "link":
                    (folder / f"real-{name}").write_bytes(b"{}")
                    path.symlink_to(f"real-{name}")
                case "nothing":
                    pass
        return folder

    def json(self, name: str) -> Any:
        content = self.files[name]
        assert isinstance(content, bytes)
        return json.loads(content)

    def put(self, name: str, content: Any, *fields: str) -> None:
        """Change a file, under these names: to these bytes, or to the JSON of a value."""
        self.files[name] = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.changes.append(Change(name, fields))

    def spoil(self, rng: Random, name: str) -> None:
        """Change the bytes of a file."""
        content = self.files[name]
        if isinstance(content, bytes):
            self.put(name, raw.spoiled(rng, content))

    def replace(self, rng: Random, name: str) -> None:
        """Put something that is no file, or none that may be read, in the place of a file."""
        self.files[name] = rng.choice(THINGS)
        self.changes.append(Change(name))


def _make_socket(path: Path) -> None:
    """The path of a socket may have few characters only, so it is made from within its folder."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path.name)

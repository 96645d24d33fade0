"""Reads small files of model and adapter folders, most of them JSON, without trusting a byte of them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_tandem.errors import ModelError
from mlx_tandem.limits import MAX_JSON_DEPTH

MOST_BYTES = 16 << 20
"""Most bytes of a file: a tokenizer's settings may list a whole vocabulary."""


def parse(raw: bytes, **hooks: Any) -> Any:
    """Return the value of the JSON text `raw`. `hooks` are those of json.loads.

    Raises:
        ValueError: The text is not JSON, has a number of thousands of digits, or more than MAX_JSON_DEPTH levels; of
            an object the message names the key.
    """
    try:
        value = json.loads(raw.decode(), **hooks)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    for key, inner in value.items() if isinstance(value, dict) else [("it", value)]:
        for level, _ in enumerate(levels(inner), 2):
            if level > MAX_JSON_DEPTH:
                raise ValueError(f"{key} is nested too deeply")
    return value


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield the list of `value`, then the list of the values inside it, then of those inside these, and so on."""
    level = [value]
    while level:
        yield level
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in the file `path`, None if there is no such file. Raise ModelError naming the file if it is
    unusable.
    """
    raw = read(path)
    if raw is None:
        return None
    try:
        value = parse(raw)
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}", param=path.name) from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object", param=path.name)
    return value


def read(path: Path) -> bytes | None:
    """Return the contents of a small regular file, None if there is no such file. Raise ModelError naming the file
    otherwise.

    A pipe or a device does not block the open.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}", param=path.name) from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file", param=path.name)
        if status.st_size > MOST_BYTES:
            raise ModelError(f"{path} is larger than {MOST_BYTES} bytes", param=path.name)
        with open(fd, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    finally:
        os.close(fd)

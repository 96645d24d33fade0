"""Opens an adapter folder safely: regular files only, each once and by descriptor, its configuration as plain data."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_tandem import limits, small_files
from mlx_tandem.adapters.formats.parts import CONFIG, WEIGHTS, Format, refuse
from mlx_tandem.errors import TooLarge


@contextmanager
def directory(folder: Path, root: Path | None = None) -> Iterator[int]:
    """Yield a descriptor of `folder`. With a `root` above it, no link on the way from there is followed."""
    try:
        fd = _open(folder) if root is None else _walk(root, folder)
    except NotADirectoryError:
        refuse("path", None, "is not a folder" if root is None else "is not a folder, or leads through a link")
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the path
        refuse("path", None, "does not exist", code="adapter_not_found")
    except OSError as e:
        link = root is not None and e.errno == errno.ELOOP  # what macOS says of a link
        refuse("path", None, "leads through a link" if link else f"cannot be opened: {e.strerror}")
    try:
        yield fd
    finally:
        os.close(fd)


def _open(path: Path | str, parent: int | None = None) -> int:
    no_links = 0 if parent is None else os.O_NOFOLLOW
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | no_links, dir_fd=parent)


def _walk(root: Path, folder: Path) -> int:
    """Open the folder step by step, each relative to the one before, so that nothing can be swapped on the way."""
    try:
        steps = folder.relative_to(root).parts
    except ValueError:
        steps = ("..",)
    if ".." in steps:
        refuse("path", None, "lies outside the adapter root")
    fd = _open(root)
    for step in steps:
        try:
            below = _open(step, fd)
        finally:
            os.close(fd)
        fd = below
    return fd


@contextmanager
def regular_file(directory: int, name: str, limit: int, follow_links: bool) -> Iterator[int]:
    """Yield a descriptor of a regular file of at most `limit` bytes. A FIFO or device does not block the open."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        refuse(name, None, "is missing from the adapter folder")
    except OSError as e:
        try:
            link = stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
        except OSError:
            link = False
        refuse(name, None, "is a symbolic link, which is not followed" if link else f"cannot be opened: {e.strerror}")
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            refuse(name, None, "is not a regular file")
        if st.st_size > limit:
            raise TooLarge(f"{name}: is {st.st_size} bytes, more than the limit of {limit}", param=name)
        yield fd
    finally:
        os.close(fd)


def exists(directory: int, name: str) -> bool:
    """Return whether the folder has an entry of this name."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def configuration(directory: int, follow_links: bool) -> dict[str, Any]:
    """Return the adapter's configuration. Raise ModelError naming the key if it is not sound JSON."""
    with regular_file(directory, CONFIG, limits.MAX_CONFIG_BYTES, follow_links) as fd:
        raw = read_exactly(fd, 0, os.fstat(fd).st_size, CONFIG)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                refuse(CONFIG, key, "appears twice")
            found[key] = value
        return found

    try:
        config = small_files.parse(raw.tobytes(), object_pairs_hook=pairs)
    except ValueError as e:
        refuse(CONFIG, None, f"is not valid JSON: {e}")
    if not isinstance(config, dict):
        refuse(CONFIG, None, "must hold a JSON object")
    for key, value in config.items():
        if any(isinstance(x, float) and not math.isfinite(x) for level in small_files.levels(value) for x in level):
            refuse(CONFIG, key, "holds NaN or infinity")
    return config


def format_of(directory: int, config: Mapping[str, Any]) -> Format:
    """Return the format of an adapter folder, judged by its files of weights. Raise ModelError if there are none."""
    present: list[Format] = [kind for kind, name in WEIGHTS.items() if exists(directory, name)]
    if len(present) == 1:
        return present[0]
    if len(present) == 2:
        return "peft" if "peft_type" in config else "mlx-lm"
    for name in ("adapter_model.bin", "adapter_model.pt", "adapters.npz"):
        if exists(directory, name):
            refuse(name, None, "is a format that is not read; convert it to safetensors")
    kind: Format = "peft" if "peft_type" in config else "mlx-lm"
    refuse(WEIGHTS[kind], None, "is missing from the adapter folder")


def read_exactly(fd: int, offset: int, size: int, name: str) -> npt.NDArray[np.uint8]:
    """Return `size` bytes of the file from `offset` on. Raise ModelError naming the file if it is shorter."""
    data = np.empty(size, np.uint8)
    view = data.data
    done = 0
    with FileIO(fd, closefd=False) as f:
        f.seek(offset)
        while done < size:
            n = f.readinto(view[done:])
            if not n:
                refuse(name, None, "is shorter than its header says")
            done += n
    return data

"""Imports mlx-lm for the first time and undoes what that import changes in the process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

WANTED_FILES = 4096
"""Files that the process may have open if the system allows so many: a large model has many."""


@contextlib.contextmanager
def _limits_kept() -> Iterator[None]:
    """Keep the process's resource limits unchanged inside the block.

    On import mlx-lm sets the hard limit of open files to 4,096. The system refuses that where the limit is lower,
    and it lowers the limit for good where it is higher.
    """
    given = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = given


def _raise_open_files() -> None:
    """Let the process open WANTED_FILES files, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a second, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


with _limits_kept():
    import mlx_lm.utils  # noqa: F401

_raise_open_files()

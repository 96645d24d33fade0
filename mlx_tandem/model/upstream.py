"""Imports mlx-lm for the first time, without what that changes in the process beside it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

WANTED_FILES = 4096
"""Files that the process may have open, where the system allows so many: a large model has many."""


@contextlib.contextmanager
def _limits_kept() -> Iterator[None]:
    """Nothing within changes what the process may use.

    On import mlx-lm sets the hard limit of open files to 4,096, which the system refuses where the limit is lower, and
    which lowers it for good where it is higher.
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
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit beside it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


with _limits_kept():
    import mlx_lm.utils  # noqa: F401

_raise_open_files()

"""Imports mlx-lm for the first time, without what that import costs and changes in the process."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from types import ModuleType

WANTED_FILES = 4096
"""Files that the process may have open if the system allows so many: a large model has many."""

UNUSED = {
    "huggingface_hub": ("snapshot_download",),
    "transformers": ("AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase",),
}
"""Names by module that mlx-lm imports for downloads and tokenizers, which this project does not use it for."""


class _Unused:
    """Stand-in for every name of UNUSED. mlx-lm derives a class from one of them and registers it at another."""

    @staticmethod
    def register(*_: object, **__: object) -> None:
        """Do nothing."""


@contextlib.contextmanager
def _without_unused() -> Iterator[None]:
    """Give imports inside the block stand-ins for UNUSED; modules that are loaded already stay.

    Importing them takes a second, which is half of an engine's start, and tens of megabytes. They can be imported
    afterwards, but mlx-lm itself cannot load a tokenizer in this process.
    """
    added = {name: ModuleType(name) for name in UNUSED if name.partition(".")[0] not in sys.modules}
    for name, module in added.items():
        vars(module).update(dict.fromkeys(UNUSED[name], _Unused))
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


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


with _limits_kept(), _without_unused():
    import mlx_lm.utils  # noqa: F401

_raise_open_files()

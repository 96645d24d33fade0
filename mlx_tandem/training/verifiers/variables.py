"""The environment variables that the program of an environment gets: never all of this server's, which hold secrets."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_tandem.config import RLTrainingConfig

NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL TMPDIR TZ LANG LANGUAGE TERM PYTHONPATH PYTHONHASHSEED VIRTUAL_ENV LD_LIBRARY_PATH
    DYLD_LIBRARY_PATH DOCKER_HOST REQUESTS_CA_BUNDLE CURL_CA_BUNDLE HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY
    http_proxy https_proxy all_proxy no_proxy
    """.split()
)
"""Variables that programs need in order to run and to reach others."""

PREFIXES = ("LC_", "XDG_", "SSL_CERT_", "HF_", "PRIME_", "VF_")
"""Beginnings of further variables: of the locale, folders and certificates, of the Hugging Face hub, and of verifiers
and Prime Intellect, whose sandboxes verifiers uses by default.
"""


def chosen(training: RLTrainingConfig, there: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables among `there` that the program of the environment gets.

    Beside the usual ones these are those in `verifiers_variables`, and those that the environment's TOML file names
    anywhere, as verifiers' settings `api_key_var`, `headers_from_env` and `forward_env` do.
    """
    named = {*training.verifiers_variables, *_texts(_file(training.verifiers))}
    return {
        name: value
        for name, value in there.items()
        if name in NAMES or name in named or name.startswith(PREFIXES)
    }  # fmt: skip


def _file(environment: str) -> object:
    """Return the settings of an environment's file; nothing where there is none, or none that can be read."""
    if not environment.endswith(".toml"):
        return None
    try:
        return tomllib.loads(Path(environment).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the program says what is wrong with it


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value of TOML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)

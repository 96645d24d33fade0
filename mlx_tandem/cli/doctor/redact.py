"""Removes everything from a report that identifies this machine or its user, because reports go into public issues."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import re
import socket
from collections.abc import Sequence
from typing import Any

_PATH = re.compile(r"(?:~|\b[A-Za-z]:)?(?:/[^\s/'\"`:,;()\[\]<>|]+){2,}/?")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_LINKS = re.compile(r"https?://\S+")


class Redactor:
    """The names and secrets of this process, and how to remove them from texts.

    Only the last part of the paths in `hidden` is shown, even if they contain blanks.
    """

    def __init__(self, hidden: Sequence[str] = ()) -> None:
        names = {socket.gethostname(), socket.gethostname().partition(".")[0], os.environ.get("USER", "")}
        with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
            names |= {getpass.getuser(), pwd.getpwuid(os.getuid()).pw_gecos.partition(",")[0]}
        self._hidden = {form for path in hidden for form in (path, os.path.realpath(path))}
        secrets = {v for k, v in os.environ.items() if _SECRET.search(k)}
        self._home = os.path.expanduser("~")
        words = {w for w in secrets if len(w) >= 6} | {
            n for n in names if len(n) >= 3 and n not in ("root", "localhost")
        }
        self._words = sorted(words, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text with paths cut to their last part and names and secrets replaced by an ellipsis."""
        for path in sorted(self._hidden, key=len, reverse=True):
            text = text.replace(path, os.path.basename(path.rstrip("/")))
        for word in self._words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "…", text)
        if len(self._home) > 1:
            text = text.replace(self._home, "~")
        return _PATH.sub(lambda found: "…/" + found[0].rstrip("/").rpartition("/")[2], _LINKS.sub("…", text))

    def tree(self, value: Any) -> Any:
        """Return plain data with every text redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.tree(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(v) for v in value]
        return value

"""Programs named like other servers' programs, whose command lines are translated into those of `tandem`."""

from __future__ import annotations

import sys

from mlx_tandem.cli import main
from mlx_tandem.cli.console import warn

TRAINING = ("rl", "sft")
"""Commands of `tandem train`."""


def mola() -> None:
    """Run `mola [-v] serve|start|stop|restart …`; `start` serves in the background."""
    words = sys.argv[1:]
    command = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    if command is not None and words[command] == "start":
        words[command : command + 1] = ["serve", "--daemon"]
    main(words)


def mlx_lm_server() -> None:
    """Run `python -m mlx_lm_server --model …`. That program binds every address; this one does so only when told to."""
    words = sys.argv[1:]
    if not any(word.split("=")[0] in ("--host", "--config", "--help", "-h") for word in words):
        warn("this listens on 127.0.0.1; for other machines give --host 0.0.0.0 and a key (--api-key-file)")
    main(["serve", *words])


def mlx_server() -> None:
    """Run `mlx-server -m …`, on port 8080 unless told otherwise."""
    main(["--called-as", "mlx-server", "serve", *sys.argv[1:]])


def mlx_parallm_serve() -> None:
    """Run `mlx_parallm_serve --model-path …`."""
    main(["--called-as", "mlx_parallm_serve", "serve", *sys.argv[1:]])


def mlx_parallm_train() -> None:
    """Run `mlx_parallm_train --mode rl …`; the value of --mode is the command."""
    words = sys.argv[1:]
    for i, word in enumerate(words):
        flag, equals, mode = word.partition("=")
        after = i + 1 if equals else i + 2
        mode = mode or "".join(words[i + 1 : after])
        if flag == "--mode" and mode in TRAINING:
            words = [mode, *words[:i], *words[after:]]
            break
    main(["--called-as", "mlx_parallm_serve", "train", *words])

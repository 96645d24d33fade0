"""The process of a led rank: it loads its share of a model and carries out the leading rank's orders.

The leading rank starts it on its own machine, and `tandem serve` on every other machine.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import structs

from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks.channel import ChannelError, RankChannel
from mlx_tandem.engine.ranks.follower import Inbox, follow
from mlx_tandem.engine.ranks.leader import EXIT_GROUP
from mlx_tandem.engine.ranks.local import KEY
from mlx_tandem.engine.ranks.remote import reach
from mlx_tandem.engine.ranks.weights import weights_digest
from mlx_tandem.engine_main import EngineLines
from mlx_tandem.errors import ModelError, TandemError
from mlx_tandem.types import MemoryBudget

EXIT_ALONE = 1
"""Exit status of a rank that has found no leading rank, or whose parent process has ended."""

log = logging.getLogger("mlx_tandem.rank")


def serve(channel: RankChannel[g.Order], rank: int, end: Callable[[int], None] = os._exit, *, model: str = "") -> int:
    """Load the share of rank number `rank` and carry out the orders that come; return the exit status.

    `end` is called with that status as soon as the leading rank is gone, whatever is being computed. `model` is the
    model's folder on this machine; empty: the one that the leading rank has.
    """
    inbox = Inbox(channel, end)
    try:
        begin = inbox.next()
        if not isinstance(begin, g.Begin):
            raise ChannelError(f"it sent {type(begin).__name__} first")
        # MLX is loaded here, when the thread that notices the end of the leading rank runs.
        from mlx_tandem.model.build import build_share
        from mlx_tandem.model.choices import Choices

        config = begin.config
        if model:
            config = structs.replace(config, model=structs.replace(config.model, path=model))

        def decided() -> tuple[Choices, MemoryBudget, StepLimits]:
            order = inbox.next()
            if not isinstance(order, g.Decided):
                raise ChannelError(f"it sent {type(order).__name__} before anything was decided")
            check_weights(order.weights, Path(config.model.path))
            return msgspec.json.decode(order.choices, type=Choices), order.budget, order.limits

        share = build_share(config, rank, inbox.adapters, decided)
        inbox.prepare = share.prepare
        channel.send(g.Loaded(share.memory()))
        follow(inbox, share)
    except ChannelError as e:
        log.info("rank %d ends: %s", rank, e)
    except TandemError as e:
        _say(channel, g.Failed(e.message, e.code or "", e.param))
    except Exception as e:
        log.exception("rank %d failed", rank)
        _say(channel, g.Failed(f"{type(e).__name__}: {e}"))
    return EXIT_GROUP


def check_weights(wanted: str, folder: Path) -> None:
    """Raise ModelError unless the weights of a folder have this digest, as those of the first rank have."""
    if weights_digest(folder) != wanted:
        raise ModelError(f"the weights in {folder} are not those of the first rank", param="model")


def _say(channel: RankChannel[g.Order], last: g.Failed) -> None:
    with suppress(ChannelError):
        channel.send(last)


def _end_with_parent() -> None:
    """End this process when its parent has ended, which holds the other end of standard input."""
    sys.stdin.buffer.read()
    os._exit(EXIT_ALONE)


def main(arguments: list[str]) -> int:
    """Run a rank; return the exit status.

    The leading rank's process passes the number of a connected socket (`--fd`). `tandem serve` on another machine
    passes the way in which MLX connects the ranks (`--mode`) and the model's folder there (`--model`).
    """
    faulthandler.enable()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EngineLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    rank = int(options["--rank"])
    if "--fd" in options:
        return serve(RankChannel(socket.socket(fileno=int(options["--fd"])), KEY, g.Order), rank)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    from mlx_tandem.model.leading import meet

    try:
        channel = reach(meet(options["--mode"], b""), rank)
    except TandemError as e:
        log.error("rank %d: %s", rank, e.message)
        return EXIT_ALONE
    return serve(channel, rank, model=options["--model"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

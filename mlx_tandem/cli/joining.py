"""Joining a leader: its base model is found on this machine, and what a trainer begins with is fetched."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from mlx_tandem import demo, limits
from mlx_tandem.adapters.convert import inspect
from mlx_tandem.cli import hub, keys
from mlx_tandem.cli.console import fail, say, warn
from mlx_tandem.config import Config
from mlx_tandem.errors import TandemError
from mlx_tandem.training.cluster import bases
from mlx_tandem.training.cluster.client import LeaderClient, Refused, Unreachable
from mlx_tandem.training.cluster.fetching import fetch
from mlx_tandem.training.cluster.folder import ClusterFolder
from mlx_tandem.training.cluster.joining import JOINED, Joined
from mlx_tandem.training.cluster.wire import Adapter, Base, Feed, Version
from mlx_tandem.training.store.database import NAME as LEARNING

RETRY = 1.0
"""Seconds between two attempts to reach a leader that this machine has never joined."""

PATIENCE = 10.0
"""Seconds that a leader may take to answer a machine that can also start without it."""

MODELS = Path("models")
"""Folder in which the leader's base is looked for by its name."""


def join(config: Config, key: str) -> Config:
    """Return the settings with the leader's base, and for a trainer with the adapter that it begins with.

    Wait `cluster.wait_s` seconds for a leader that does not answer, unless this machine has joined it before. End the
    process with one line and status 1 if it does not answer until then, if it refuses, or if its base is not here.
    """
    cluster = config.cluster
    folder = ClusterFolder(cluster.dir)
    client = LeaderClient(cluster.connect_to, key)
    try:
        folder.lock()
    except TandemError as e:
        fail(f"{e.message} (--cluster-dir)")
    keys.warn_if_readable(key, client.url)
    try:
        before = folder.read(JOINED, Joined)
        if before is not None and before.url != client.url:
            before = None
        joined = _joined(config, client, folder, before)
    except TandemError as e:
        fail(e.message)
    finally:
        folder.close()
    names = config.server.served_model_names or joined.base.names
    config = replace(
        config,
        engine=replace(config.engine, model=replace(config.engine.model, path=joined.model)),
        server=replace(config.server, served_model_names=names),
        rl_training=replace(config.rl_training, adapter=joined.base.adapter),
    )
    if joined.beginning is None:
        return config
    return replace(
        config,
        adapters=(*config.adapters, (joined.base.adapter, str(folder.version(joined.beginning.digest)))),
        rl_training=replace(config.rl_training, init_from=joined.base.adapter),
    )


def _joined(config: Config, client: LeaderClient, folder: ClusterFolder, before: Joined | None) -> Joined:
    """Return what is known of the leader now, which is written down."""
    try:
        found = _ask(client, PATIENCE if before is not None else config.cluster.wait_s, once=before is not None)
    except Unreachable as e:
        if before is None:
            fail(f"{e} (--connect-to)")
        warn(f"{e}; this server goes on with what it has from the leader at {client.url}")
        return before
    base, feed = found
    own = secrets.token_hex(8) if before is None else before.id
    joined = Joined(client.url, own, base, _model(config, base, before))
    trained = next((adapter for adapter in feed.adapters if adapter.name == base.adapter), None)
    if config.rl_training.enabled and trained is not None:
        newest = max(version.number for version in trained.versions)
        joined = replace(joined, newest=newest, beginning=_beginning(config, client, folder, trained, before))
    folder.write(JOINED, joined)
    return joined


def _ask(client: LeaderClient, seconds: float, *, once: bool) -> tuple[Base, Feed]:
    """Return the leader's base and adapters, for which it has `seconds` in all; with `once`, ask one time only.

    What the user waits for is said at once. Raises Unreachable when the time is over, or at once if waiting longer
    would not help. End the process with one line and status 1 if the leader refuses.
    """
    say(f"connecting to the leader at {client.url}")
    end = time.monotonic() + seconds

    async def asked() -> tuple[Base, Feed]:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                return await client.base(), await client.feed()
        except TimeoutError:
            raise Unreachable(f"no answer from {client.url} within {seconds:g} s") from None

    said = ""
    while True:
        try:
            return asyncio.run(asked())
        except Refused as e:
            key = "; set its key by TANDEM_API_KEY or --api-key-file" if e.status == 401 else ""
            fail(f"{e}{key} (--connect-to)")
        except Unreachable as e:
            if once or e.lasting:
                raise
            reason = str(e)
        left = end - time.monotonic()
        if left <= RETRY:
            raise Unreachable(f"the leader has not answered within {seconds:g} s (--wait-for-leader): {reason}")
        if reason != said:
            said = reason
            say(f"waiting for the leader for at most {left:.0f} s: {reason}")
        time.sleep(RETRY)


def _model(config: Config, base: Base, before: Joined | None) -> str:
    """Return the folder of the leader's base on this machine. End the process if there is none."""
    given = config.engine.model.path
    if given:
        try:
            folder = hub.find(given, "model").folder
        except hub.HubError as e:
            fail(str(e))
        if bases.digest(folder) != base.sha256:
            fail(f"{given} is not the leader's base model {base.name}: its files differ (--model)")
        return str(folder)
    for folder in _candidates(base, before):
        if bases.digest(folder) == base.sha256:
            return str(folder)
    fail(
        f"the leader's base model {base.id or base.name} is not on this machine: copy its folder to "
        f"{MODELS / base.name}, or name it with --model-path FOLDER"
    )


def _candidates(base: Base, before: Joined | None) -> Iterator[Path]:
    """Yield the folders in which the base may lie, the most likely one first; its hub id comes last."""
    named = [MODELS / base.name] if limits.NAME.fullmatch(base.name) else []
    for folder in (*([Path(before.model)] if before is not None else []), *named, demo.MODEL_PATH):
        if folder.is_dir():
            yield folder
    if base.id:
        try:
            yield hub.find_base(base.id, base.sha256)
        except hub.HubError as e:
            warn(str(e))


def _beginning(
    config: Config, client: LeaderClient, folder: ClusterFolder, trained: Adapter, before: Joined | None
) -> Version | None:
    """Return the version that a trainer begins with: the leader's current one, unless the trainer has begun before."""
    own = {name for name, _ in config.adapters}
    if before is not None:
        return before.beginning
    if config.rl_training.init_from or trained.name in own:
        return None
    if (Path(config.checkpointing.checkpoint_dir) / LEARNING).exists():
        return None
    version = next(version for version in trained.versions if version.number == trained.current)
    try:
        asyncio.run(fetch(client, folder, replace(trained, versions=(version,))))
    except (Refused, Unreachable) as e:
        fail(f"{e} (--connect-to)")
    found = inspect(folder.version(version.digest))
    if found.problems or found.digest not in (None, version.digest):  # None: only the engine can compute it
        folder.remove(version.digest)
        why = "; ".join(found.problems) or f"its content is {found.digest}, not {version.digest}"
        fail(f"the leader's version {trained.name}@{version.number} cannot be trained further: {why} (--connect-to)")
    return version

"""A leader of several machines for tests, and what a trainer does with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from mlx_tandem import demo
from mlx_tandem.config import ClusterConfig
from mlx_tandem.training.cluster.client import LeaderClient
from mlx_tandem.training.cluster.wire import CHUNK, Feed, File, Publication, Version
from tests.serving import RunningServer, demo_config, serving

KEY = "the-key"
OURS, OTHERS = "0" * 16, "1" * 16
PATH = "/v1/cluster"


@contextlib.contextmanager
def leading(folder: Path) -> Iterator[RunningServer]:
    """A leader with the built-in model, which keeps its files in `folder`."""
    config = replace(demo_config(api_key=KEY), cluster=ClusterConfig(share=True, dir=str(folder / "cluster")))
    with serving(config) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


def feed(leader: RunningServer) -> Feed:
    return msgspec.json.decode(leader.client.get(f"{PATH}/versions").content, type=Feed)


def shown(leader: RunningServer, name: str) -> Version:
    """The version of one of the leader's own adapters, whose content a trainer may publish, too."""
    (version,) = (adapter.versions[-1] for adapter in feed(leader).adapters if adapter.name == name)
    return version


def content(name: str, file: File) -> bytes:
    return (demo.ADAPTER_PATHS[name] / file.name).read_bytes()


async def upload(client: LeaderClient, file: File, whole: bytes) -> None:
    there = await client.upload(OURS, file, 0, b"")
    while there < file.size:
        there = await client.upload(OURS, file, there, whole[there : there + CHUNK])


def publication(leader: RunningServer, version: Version, **fields: Any) -> Publication:
    return Publication(**{"trainer": OURS, "base": feed(leader).base, "adapter": "policy", "version": version} | fields)


def published(leader: RunningServer, client: LeaderClient, name: str, number: int, **fields: Any) -> None:
    """Publish the content of one of the leader's own adapters as a version of the trained one."""
    version = replace(shown(leader, name), number=number)

    async def work() -> None:
        for file in version.files:
            await upload(client, file, content(name, file))
        await client.publish(publication(leader, version, **fields))

    asyncio.run(work())

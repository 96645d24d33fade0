"""Fetching versions from a leader into the folder of this machine: resumable, and compared with their hashes."""

from __future__ import annotations

import asyncio

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.cluster.client import LeaderClient, Refused
from mlx_tandem.training.cluster.folder import ClusterFolder
from mlx_tandem.training.cluster.wire import Adapter, File, Version


async def fetch(client: LeaderClient, folder: ClusterFolder, adapter: Adapter) -> None:
    """Fetch the versions of an adapter that the folder does not have. Raises Unreachable and Refused.

    What has arrived before an interruption is not fetched again.
    """
    for version in adapter.versions:
        if folder.source(version.digest) is None:
            await _fetch(client, folder, version)


async def _fetch(client: LeaderClient, folder: ClusterFolder, version: Version) -> None:
    try:
        for file in version.files:
            await _fetch_file(client, folder, file)
        await asyncio.to_thread(folder.assemble, version)
    except InvalidRequest as e:
        raise Refused(e.message) from e


async def _fetch_file(client: LeaderClient, folder: ClusterFolder, file: File) -> None:
    there = folder.received(file)
    while there < file.size:
        content = await client.chunk(file, there)
        if not content:
            raise Refused(f"the leader's file {file.sha256} ends after {there} of {file.size} bytes")
        there = await asyncio.to_thread(folder.append, file, there, content)

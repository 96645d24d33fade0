"""The KV offload of real servers, one after the other on one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem.config import Config, DiskCacheConfig
from tests.api.test_cache import LONG, cached
from tests.serving import ROOT, RunningServer, demo_config, serving
from tests.waiting import until

pytestmark = pytest.mark.restarts

NAMES = ("tandem-demo", "shout")


def config(folder: Path, **disk: Any) -> Config:
    base = demo_config()
    return replace(base, engine=replace(base.engine, disk=DiskCacheConfig(dir=str(folder), **disk)))


def stats(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/v1/cache/stats").json()["disk"]
    return found


def opened(server: RunningServer) -> RunningServer:
    """The drive is asked from here on."""
    until(lambda: (now := stats(server))["open"] and not now["scanning"])
    return server


def ask(server: RunningServer, model: str) -> dict[str, Any]:
    answer: dict[str, Any] = server.chat(LONG, model=model, temperature=0).json()
    return answer


@pytest.mark.promise("FLT-27")
@pytest.mark.parametrize("policy", ["evict_only", "write_through"])
def test_a_prompt_is_there_after_a_restart(policy: str, tmp_path: Path) -> None:
    """With the same answer, for each adapter its own; another server is refused the folder; then the folder goes."""
    folder = tmp_path / "kv"
    with serving(config(folder, policy=policy)) as server:
        opened(server)
        cold = {name: ask(server, name) for name in NAMES}
    with serving(config(folder, policy=policy)) as server:
        opened(server)
        for name in NAMES:
            again = ask(server, name)
            assert again["choices"][0]["message"] == cold[name]["choices"][0]["message"]
            assert again["usage"]["prompt_tokens"] - 24 < cached(again) < again["usage"]["prompt_tokens"]
        until(lambda: stats(server)["hit_tokens"])  # it comes with the engine's next sign of life
        now = stats(server)
        assert now["hits"] > 0 == now["quarantined"]
        families = text_string_to_metric_families(server.client.get("/metrics").text)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        assert values["tandem_disk_cache_hits_total"] >= now["hits"]
        assert values["tandem_disk_cache_reload_bytes_total"] > 0
        if policy == "evict_only":
            return
        other = subprocess.run(
            [sys.executable, "-m", "tests.program", msgspec.json.encode(config(folder)).decode()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert other.returncode != 0
        assert str(server.engine_pid()) in other.stderr, "who has it"
        shutil.rmtree(folder)
        assert ask(server, "json")["choices"][0]["message"]["content"]
        until(lambda: stats(server)["off"])
        assert ask(server, NAMES[0])["choices"][0]["message"] == cold[NAMES[0]]["choices"][0]["message"]


def test_a_damaged_block_is_computed_again(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serving(config(folder)) as server:
        opened(server)
        cold = ask(server, NAMES[0])
    (segment,) = folder.glob("segment-*")
    whole = bytearray(segment.read_bytes())
    half = len(whole) // 2
    whole[half:] = bytes(b ^ 1 if i % 4096 == 0 else b for i, b in enumerate(whole[half:]))
    segment.write_bytes(whole)
    with serving(config(folder)) as server:
        opened(server)
        again = ask(server, NAMES[0])
        assert again["choices"][0]["message"] == cold["choices"][0]["message"]
        assert cached(again) < cold["usage"]["prompt_tokens"] - 24
        until(lambda: stats(server)["quarantined"])

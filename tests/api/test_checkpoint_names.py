"""No adapter and no alias takes the name of a checkpoint, whichever way it comes, and no DELETE hides a checkpoint."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.config import Arm, Config
from tests.api.learns import SORT, learning_config, trajectories
from tests.serving import RunningServer, serving
from tests.unit.cli_tools import tandem


def lay(root: Path, *names: str) -> None:
    """Put adapter folders with these names under the root."""
    for name in names:
        shutil.copytree(demo.ADAPTER_PATHS["shout"], root / name)


def config_in(folder: Path) -> Config:
    (folder / "root").mkdir(exist_ok=True)
    return structs.replace(learning_config(folder), adapter_root=str(folder / "root"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("names")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """A server with a checkpoint that somebody has called `kept`."""
    config = config_in(folder)
    lay(folder / "root", "plain", "checkpoint-9", "best-performance")
    with serving(config) as running:
        body = {"trajectories": trajectories(), "wait": True, "checkpoint_name": "kept"}
        assert running.client.post("/v1/training/update", json=body).status_code == 200
        yield running


def digest(server: RunningServer, name: str) -> str:
    """The content that a request for `name` gets."""
    assert server.complete(SORT, model=name).status_code == 200
    reply = server.client.get(f"/v1/adapters/{name}")
    return str(reply.json()["digest"])


def cli(server: RunningServer, *args: str) -> subprocess.CompletedProcess[str]:
    return tandem("adapters", *args, "--url", server.url)


@pytest.mark.parametrize("name", ["kept", "best-performance", "checkpoint-500", "checkpoint-500.2"])
def test_no_request_takes_a_name(server: RunningServer, name: str) -> None:
    client, before = server.client, digest(server, "kept")
    for reply, param in (
        (client.post("/v1/adapters", json={"name": name, "path": "plain"}), "name"),
        (client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "plain"}), "lora_name"),
        (
            client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "plain", "load_inplace": True}),
            "lora_name",
        ),
        (client.put(f"/v1/aliases/{name}", json={"arms": [{"adapter": "plain", "weight": 1}]}), "name"),
    ):
        assert (reply.status_code, reply.json()["error"]["param"]) == (409, param), reply.text
    loaded = cli(server, "load", name, "plain")
    assert loaded.returncode == 1 and loaded.stderr.count("\n") == 1 and name in loaded.stderr
    assert digest(server, "kept") == before


def test_no_request_hides_a_checkpoint(server: RunningServer) -> None:
    before = digest(server, "kept")
    for reply, param in (
        (server.client.delete("/v1/adapters/kept"), "name"),
        (server.client.post("/v1/unload_lora_adapter", json={"lora_name": "kept"}), "lora_name"),
    ):
        assert (reply.status_code, reply.json()["error"]["param"]) == (409, param), reply.text
        assert "checkpoint" in reply.json()["error"]["message"]
    assert cli(server, "unload", "kept").returncode == 1
    assert digest(server, "kept") == before
    assert server.complete(SORT, model="kept").status_code == 200


def test_no_folder_under_the_root_is_taken_for_one(server: RunningServer, folder: Path) -> None:
    """Neither those that are there at the start nor those that come later."""
    lay(folder / "root", "kept", "checkpoint-10")
    shout = digest(server, "shout")
    assert digest(server, "kept") != shout
    for name in ("checkpoint-9", "checkpoint-10", "best-performance"):
        assert server.complete(SORT, model=name).status_code == 404
        assert server.client.post("/v1/adapters", json={"name": name}).status_code == 409
    listed = {a["name"] for a in server.client.get("/v1/adapters").json()["adapters"]}
    assert not {"checkpoint-9", "checkpoint-10", "best-performance"} & listed
    assert server.complete(SORT, model="plain").status_code == 200
    assert digest(server, "plain") == shout


def test_a_checkpoint_s_name_is_taken_once(server: RunningServer) -> None:
    again = server.client.post("/v1/training/checkpoint", json={"name": "Kept"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "checkpoint_exists")
    adapter = server.client.post("/v1/training/checkpoint", json={"name": "shout"})
    assert (adapter.status_code, adapter.json()["error"]["code"]) == (409, "conflict")


def test_a_start_takes_no_name_either(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An adapter or alias that the settings name is refused; a folder under the root is passed over."""
    config = config_in(tmp_path)
    with serving(config) as server:
        assert server.client.post("/v1/training/checkpoint", json={"name": "kept"}).status_code == 200
        saved = digest(server, "kept")
    lay(tmp_path / "root", "kept")
    shout = str(demo.ADAPTER_PATHS["shout"])
    for wrong in (
        structs.replace(config, adapters=(*config.adapters, ("kept", shout))),
        structs.replace(config, aliases=(("kept", (Arm("shout", 1.0),)),)),
    ):
        with pytest.raises(RuntimeError, match="did not start"), serving(wrong):
            pass
        assert "is the name of a checkpoint of this server" in capfd.readouterr().err
    with serving(config) as server:
        assert digest(server, "kept") == saved
    assert '"adapter folder passed over", "folder": "kept"' in capfd.readouterr().err


def test_the_command_line_refuses_it_before_anything_is_loaded(tmp_path: Path) -> None:
    args = ["--enable-rl-training", "--checkpoint-dir", str(tmp_path), "--port", "0"]
    adapter = ["--adapter", "checkpoint-3", str(demo.ADAPTER_PATHS["shout"])]
    command = [sys.executable, "-m", "mlx_tandem", "serve", str(demo.MODEL_PATH), *args, *adapter]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert "'checkpoint-3' in 'adapters' is a name that checkpoints get by themselves" in done.stderr

"""Adapters under a root, aliases, pins, and vLLM's routes, over HTTP on a server of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mlx_tandem import demo
from mlx_tandem.config import Arm
from tests.serving import RunningServer, demo_config, serving
from tests.waiting import until

QUESTION = "What is 12 + 5?"
ANSWERS = {"base": "12 + 5 = 17.", "shout": "12 + 5 = 17!", "json": '{"answer": 17}'}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapter folders, one of them broken, and things beside them that are none."""
    root = tmp_path_factory.mktemp("adapters")
    for i in range(40):
        shutil.copytree(demo.ADAPTER_PATHS["shout" if i % 2 else "json"], root / f"a{i}")
    shutil.copytree(demo.ADAPTER_PATHS["json"], root / "passing")
    (root / "deep" / "er").mkdir(parents=True)
    shutil.copytree(demo.ADAPTER_PATHS["shout"], root / "deep" / "er" / "medical-adapter")
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{}")
    (root / "empty").mkdir()
    (root / "not a name").mkdir()
    for odd in ("trailing.", "twin", "Twin", "Base"):
        shutil.copytree(demo.ADAPTER_PATHS["shout"], root / odd)
    (root / "file").write_text("")
    outside = tmp_path_factory.mktemp("outside")
    shutil.copytree(demo.ADAPTER_PATHS["shout"], outside / "secret")
    (root / "link").symlink_to(outside / "secret")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    config = demo_config()
    config = msgspec.structs.replace(
        config,
        adapter_root=str(root),
        adapters=(("configured", str(demo.ADAPTER_PATHS["json"])),),
        aliases=(("both", (Arm("a0", 1.0), Arm("a1", 3.0))),),
        engine=msgspec.structs.replace(
            config.engine, lora=msgspec.structs.replace(config.engine.lora, max_loras=3, max_cpu_loras=2)
        ),
    )
    with serving(config) as running:
        yield running


def answer(server: RunningServer, model: str, **fields: object) -> str:
    reply = server.chat(QUESTION, model=model, temperature=0, **fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_folders_under_the_root_are_models(server: RunningServer) -> None:
    listed = server.client.get("/v1/adapters").json()
    names = {a["name"]: a for a in listed["adapters"]}
    assert {f"a{i}" for i in range(40)} | {"configured", "broken"} <= set(names)
    assert not {"empty", "not a name", "file", "deep", "trailing.", "Base"} & set(names)
    assert len({"twin", "Twin"} & set(names)) == 1
    assert (names["configured"]["version"], names["a39"]["version"]) == (1, None)
    assert listed["registered"] == len(names)
    models = {m["id"]: m for m in server.client.get("/v1/models").json()["data"]}
    assert {"a0", "a39", "configured", "both"} <= set(models)
    # Arms of an alias are read when it is made.
    states = {name: (models[name]["loaded"], models[name]["status"]) for name in ("a0", "a39", "both")}
    assert states == {"a0": (True, "loaded"), "a39": (False, "available_not_loaded"), "both": (True, "loaded")}
    assert (models["a39"]["root"], models["a39"]["parent"]) == ("a39", "tandem-demo")
    tags, running = (
        {m["name"]: m for m in server.client.get(f"/api/{route}").json()["models"]} for route in ("tags", "ps")
    )
    assert set(tags) == set(models)
    assert set(running) == {name for name, model in models.items() if model["loaded"]}
    assert (tags["a0"]["digest"], tags["a0"]["size"]) != (tags["a39"]["digest"], tags["a39"]["size"])
    read = names["a0"]
    assert (tags["a0"]["digest"], tags["a0"]["size"]) == (read["digest"], read["memory_bytes"])
    # Reading them needs no command, more of them than fit into memory or slots take turns, and each is itself.
    for i in range(40):
        assert answer(server, f"a{i}") == ANSWERS["shout" if i % 2 else "json"]
    listed = server.client.get("/v1/adapters").json()
    assert listed["loaded"] <= 2 and listed["resident"] <= 3
    entry = server.client.get("/v1/adapters/a3").json()
    assert entry["requests"] == 1 and entry["open"] == 0 and entry["size_bytes"] > 0


def test_a_folder_called_like_the_base_is_no_model(server: RunningServer) -> None:
    assert server.chat(QUESTION, model="Base").status_code == 404
    reply = server.client.post("/v1/adapters", json={"name": "Base"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (409, "name")


def test_an_alias_of_a_removed_adapter_says_so(server: RunningServer) -> None:
    server.client.post("/v1/adapters", json={"name": "brief", "path": "a1"})
    server.client.put("/v1/aliases/orphan", json={"arms": [{"adapter": "brief", "weight": 1}]})
    assert server.client.get("/v1/models/orphan").json()["status"] == "loaded"
    server.client.delete("/v1/adapters/brief")
    listed = {m["id"]: m for m in server.client.get("/v1/models").json()["data"]}
    assert (listed["orphan"]["loaded"], listed["orphan"]["status"]) == (False, "error_loading")
    server.client.delete("/v1/aliases/orphan")


def test_a_folder_that_went_after_it_was_listed(server: RunningServer, root: Path) -> None:
    assert server.client.get("/v1/models/passing").json()["status"] == "available_not_loaded"
    shutil.rmtree(root / "passing")
    reply = server.client.post("/v1/adapters", json={"name": "passing"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "adapter_not_found")
    reply = server.chat(QUESTION, model="passing")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "no longer there" in reply.json()["error"]["message"]


def test_a_broken_folder_is_the_callers_error_each_time(server: RunningServer) -> None:
    for _ in range(2):
        reply = server.chat(QUESTION, model="broken")
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_adapter", "model")
        assert error["message"].startswith("adapter broken: ")


def test_asking_for_a_version_that_is_not_there_changes_nothing(server: RunningServer) -> None:
    server.client.post("/v1/adapters", json={"name": "a9", "pin": True})
    for _ in range(2):
        assert server.chat(QUESTION, model="a9@99").status_code == 404
    entry = server.client.get("/v1/adapters/a9").json()
    assert (entry["id"], entry["pinned"]) == ("a9@1", True)


def test_only_the_current_version_is_pinned(server: RunningServer, root: Path) -> None:
    for content, pin in (("shout", True), ("json", True), ("down", False)):
        shutil.rmtree(root / "pins", ignore_errors=True)
        shutil.copytree(demo.ADAPTER_PATHS[content], root / "pins")
        assert server.client.post("/v1/adapters", json={"name": "pins", "pin": pin}).json()["pinned"] is pin
    assert [server.client.get(f"/v1/adapters/pins@{v}").json()["pinned"] for v in (1, 2, 3)] == [False] * 3


def test_a_name_goes_back_to_a_version(server: RunningServer, root: Path) -> None:
    for content in ("json", "shout"):
        shutil.rmtree(root / "moves", ignore_errors=True)
        shutil.copytree(demo.ADAPTER_PATHS[content], root / "moves")
        server.client.post("/v1/adapters", json={"name": "moves"})
    assert answer(server, "moves") == ANSWERS["shout"]
    back = server.client.post("/v1/adapters", json={"name": "moves", "version": 1, "pin": True}).json()
    assert (back["status"], back["id"], back["pinned"]) == ("current", "moves@1", True)
    assert [answer(server, model) for model in ("moves", "moves@2")] == [ANSWERS["json"], ANSWERS["shout"]]
    [listed] = [a for a in server.client.get("/v1/adapters").json()["adapters"] if a["name"] == "moves"]
    assert (listed["version"], listed["versions"]) == (1, [1, 2])
    server.client.post("/v1/adapters", json={"name": "moves", "version": 2})
    assert answer(server, "moves") == ANSWERS["shout"]
    for body, status, param in (
        ({"version": 3}, 404, "version"),
        ({"version": 0}, 404, "version"),
        ({"version": -1}, 400, "version"),
        ({"version": 1, "path": "moves"}, 400, "version"),
        ({"version": 1, "name": "nobody"}, 404, "version"),
        ({"version": 1, "name": "base"}, 409, "name"),
    ):
        refused = server.client.post("/v1/adapters", json={"name": "moves"} | body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert answer(server, "moves") == ANSWERS["shout"]


def test_a_new_folder_is_found_when_it_is_asked_for(server: RunningServer, root: Path) -> None:
    assert server.chat(QUESTION, model="later").status_code == 404
    shutil.copytree(demo.ADAPTER_PATHS["shout"], root / "later")
    assert answer(server, "later") == ANSWERS["shout"]
    assert server.client.delete("/v1/adapters/later").json()["versions"] == [1]
    assert server.chat(QUESTION, model="later").status_code == 404
    assert server.client.post("/v1/adapters", json={"name": "later"}).json()["id"] == "later@2"
    assert server.client.delete("/v1/adapters/a39").status_code == 200
    assert server.chat(QUESTION, model="a39").status_code == 404


@pytest.mark.parametrize("path", ["./deep/er/medical-adapter", "deep/er/medical-adapter", None])
def test_a_path_lies_under_the_root(server: RunningServer, root: Path, path: str | None) -> None:
    path = path or str(root / "deep" / "er" / "medical-adapter")
    reply = server.client.post("/v1/adapters", json={"name": "medical", "path": path})
    assert reply.status_code == 200, reply.text
    assert answer(server, "medical") == ANSWERS["shout"]


def test_a_root_behind_a_link_is_known_by_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    shutil.copytree(demo.ADAPTER_PATHS["shout"], tmp_path / "real" / "x")
    (tmp_path / "root").symlink_to("real")
    config = msgspec.structs.replace(demo_config(), adapter_root=str(tmp_path / "root"))
    with serving(config) as server:
        for place in ("root", "real"):
            body = {"name": place, "path": str(tmp_path / place / "x")}
            reply = server.client.post("/v1/adapters", json=body)
            assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "path",
    ["../outside0/secret", "/etc", "a0/../../outside0/secret", "/", "", ".", "deep/../..", "a\0b", "a\nb", "x" * 5000],
)
def test_a_path_outside_the_root_is_refused(server: RunningServer, path: str) -> None:
    reply = server.client.post("/v1/adapters", json={"name": "x", "path": path})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "path")


@pytest.mark.promise("B4")
def test_a_link_out_of_the_root_is_not_followed(server: RunningServer) -> None:
    for reply in (
        server.client.post("/v1/adapters", json={"name": "x", "path": "link"}),
        server.client.post("/v1/adapters", json={"name": "link"}),
    ):
        assert reply.status_code == 400, reply.text
        assert "link" in reply.json()["error"]["message"]
    assert server.chat(QUESTION, model="link").status_code in (400, 404)


def test_no_root_no_paths() -> None:
    config = msgspec.structs.replace(demo_config(), adapter_root="")
    with serving(config) as server:
        reply = server.client.post("/v1/adapters", json={"name": "x", "path": str(demo.ADAPTER_PATHS["shout"])})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_paths")
        assert server.client.post("/v1/adapters", json={"name": "shout"}).json()["id"] == "shout@1"
        assert server.client.post("/v1/adapters", json={"name": "x"}).status_code == 404


def test_an_alias_keeps_a_user_and_counts_its_arms(server: RunningServer) -> None:
    given = Counter()
    for i in range(24):
        first = answer(server, "both", user=f"user-{i}")
        assert first == answer(server, "both", user=f"user-{i}")
        given[first] += 2
    assert set(given) == {ANSWERS["json"], ANSWERS["shout"]}
    (alias,) = server.client.get("/v1/aliases").json()["aliases"]
    arms = {a["adapter"]: a for a in alias["arms"]}
    assert (arms["a0"]["share"], arms["a1"]["share"]) == (0.25, 0.75)
    assert (arms["a0"]["requests"], arms["a1"]["requests"]) == (given[ANSWERS["json"]], given[ANSWERS["shout"]])
    assert arms["a1"]["generated_tokens"] > 0
    metrics = server.client.get("/metrics").text
    assert f'tandem_alias_requests_total{{alias="both",arm="a1"}} {given[ANSWERS["shout"]]}.0' in metrics


def test_an_alias_keeps_a_user_whatever_the_route(server: RunningServer) -> None:
    """Each way is asked several times, since an arm that is drawn anew may be the user's own by chance."""

    def model(user: str, path: str, **body: object) -> str:
        own = {"metadata": {"user_id": user}} if path == "/v1/messages" else {"user": user}
        reply = server.client.post(path, json=own | body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["model"])

    chat = [{"role": "user", "content": "2 +"}]
    seen = set()
    for user in ("ann", "bob", "eve", "joe", "kim", "lea"):
        asked = model(user, "/v1/completions", model="both", prompt="2 +", max_tokens=1)
        seen.add(asked)
        for _ in range(2):
            assert model(user, "/v1/perplexity", model="both", text="two words") == asked
            assert model(user, "/v1/chat/completions", model="both", messages=chat, max_tokens=1) == asked
            text = {"prompt": "2 +", "max_tokens": 1}
            assert model(user, "/v1/completions", lora_adapter="both", **text) == asked
            assert model(user, "/v1/completions", model="both", lora_adapter=asked, **text) == asked
            assert model(user, "/v1/messages", model="both", messages=chat, max_tokens=1) == asked
            assert model(user, "/v1/responses", model="both", input="2 +", max_output_tokens=16) == asked
            assert model(user, "/v1/embeddings", model="both", input="2 +") == asked
    assert len(seen) == 2, "both arms have somebody"


def test_an_alias_is_moved(server: RunningServer) -> None:
    put = {"arms": [{"adapter": "a1", "weight": 1}]}
    assert server.client.put("/v1/aliases/production", json=put).json()["arms"][0]["share"] == 1
    assert answer(server, "production") == ANSWERS["shout"]
    assert server.chat(QUESTION, model="production").json()["model"] == "a1@1"
    put = {"arms": [{"adapter": "a0@1", "weight": 1}]}
    server.client.put("/v1/aliases/production", json=put)
    assert answer(server, "production") == ANSWERS["json"]
    put = {"arms": [{"adapter": "base", "weight": 1}]}
    server.client.put("/v1/aliases/production", json=put)
    assert answer(server, "production") == ANSWERS["base"]
    alias = server.client.get("/v1/aliases/production").json()
    assert (alias["name"], [arm["adapter"] for arm in alias["arms"]]) == ("production", ["base"])
    assert server.client.delete("/v1/aliases/production").status_code == 200
    gone = server.client.get("/v1/aliases/production")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "alias_not_found")
    assert server.chat(QUESTION, model="production").status_code == 404


@pytest.mark.parametrize(
    ("name", "arms", "status", "param"),
    [
        ("x", [{"adapter": "nobody", "weight": 1}], 404, "arms[0].adapter"),
        ("x", [{"adapter": "a0", "weight": 1}, {"adapter": "a0@9", "weight": 1}], 404, "arms[1].adapter"),
        ("x", [{"adapter": "a0", "weight": -1}], 400, "arms[0].weight"),
        ("x", [], 400, "arms"),
        ("x", [{"adapter": "a0"}], 400, "arms[0].weight"),
        ("a0", [{"adapter": "a1", "weight": 1}], 409, "name"),
        ("base", [{"adapter": "a1", "weight": 1}], 409, "name"),
        ("-x", [{"adapter": "a1", "weight": 1}], 400, "alias"),
    ],
)
def test_aliases_that_are_refused(server: RunningServer, name: str, arms: object, status: int, param: str) -> None:
    reply = server.client.put(f"/v1/aliases/{name}", json={"arms": arms})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_an_adapter_cannot_take_an_aliass_name(server: RunningServer) -> None:
    reply = server.client.post("/v1/adapters", json={"name": "both", "path": "a0"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (409, "name")


def test_vllms_routes(server: RunningServer, root: Path) -> None:
    load = {"lora_name": "sql", "lora_path": str(root / "a1")}
    reply = server.client.post("/v1/load_lora_adapter", json=load)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert answer(server, "sql") == ANSWERS["shout"]
    again = server.client.post("/v1/load_lora_adapter", json=load)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    inplace = server.client.post("/v1/load_lora_adapter", json=load | {"lora_path": "a0", "load_inplace": True})
    assert inplace.status_code == 200
    assert answer(server, "sql") == ANSWERS["json"]
    outside = server.client.post("/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": "/etc"})
    assert (outside.status_code, outside.json()["error"]["param"]) == (400, "lora_path")
    gone = server.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert server.chat(QUESTION, model="sql").status_code == 404
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 404


def test_a_pinned_adapter_stays_on_the_device(server: RunningServer) -> None:
    assert server.client.post("/v1/adapters", json={"name": "a7", "pin": True}).json()["pinned"] is True
    for i in (7, 10, 11, 12, 13, 14, 15, 16):
        answer(server, f"a{i}")
    # Statistics come with the heartbeat after the last answer.
    until(lambda: server.client.get("/v1/adapters/a7").json()["resident"])
    assert server.client.get("/v1/adapters/a7").json()["pinned"]


def test_what_changed_on_disk_is_said(server: RunningServer, root: Path) -> None:
    shutil.copytree(demo.ADAPTER_PATHS["down"], root / "changing")
    settings = json.loads((root / "changing" / "adapter_config.json").read_text())
    settings["lora_alpha"] *= 1.01  # no other folder has this content
    (root / "changing" / "adapter_config.json").write_text(json.dumps(settings))
    assert server.chat(QUESTION, model="changing").json()["model"] == "changing@1"
    answer(server, "a20")
    answer(server, "a21")  # two others: the memory of this server holds no more
    shutil.rmtree(root / "changing")
    shutil.copytree(demo.ADAPTER_PATHS["shout"], root / "changing")
    reply = server.chat(QUESTION, model="changing")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "adapter_changed")
    assert server.client.post("/v1/adapters", json={"name": "changing"}).json()["id"] == "changing@2"
    assert answer(server, "changing") == ANSWERS["shout"]


def test_a_fresh_engine_knows_the_versions_of_the_last(server: RunningServer) -> None:
    answer(server, "a5")
    before = server.client.get("/v1/adapters").json()["registered"]
    os.kill(server.engine_pid(), signal.SIGKILL)
    until(lambda: server.client.get("/health").json()["engine_restarts"])
    until(lambda: server.client.get("/readyz").status_code == 200)
    for model, text in (("a5@1", "shout"), ("a4", "json"), ("base", "base"), ("configured", "json")):
        assert answer(server, model) == ANSWERS[text]
    assert server.client.get("/v1/adapters").json()["registered"] == before

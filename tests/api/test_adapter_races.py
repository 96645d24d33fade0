"""Adapters that are loaded, asked for and removed all at once: a version never means two things while it is there."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from msgspec import structs

from mlx_tandem import demo
from tests.serving import RunningServer, demo_config, serving
from tests.waiting import until

T = TypeVar("T")

CONTENTS = 6
"""Folders `c0` and so on under the root, each with a content of its own."""

LONG = {"prompt": "Sort down: 3 1 2", "max_tokens": 160, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contents that answer differently: the built-in adapters, some with more weight."""
    root = tmp_path_factory.mktemp("adapters")
    for i in range(CONTENTS):
        source = demo.ADAPTER_PATHS[("json", "down")[i % 2]]
        shutil.copytree(source, root / f"c{i}")
        config = root / f"c{i}" / "adapter_config.json"
        said = json.loads(config.read_text())
        said["lora_alpha"] *= 1 + i // 2 * 0.75
        config.write_text(json.dumps(said))
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    """Memory and slots for two adapters, so that they come and go."""
    config = demo_config()
    lora = structs.replace(config.engine.lora, max_loras=2, max_cpu_loras=2)
    engine = structs.replace(config.engine, lora=lora)
    with serving(structs.replace(config, engine=engine, adapter_root=str(root), adapters=())) as running:
        yield running


@pytest.fixture(scope="module")
def said(server: RunningServer) -> dict[str, list[int]]:
    """By digest, what each content says when nothing else runs."""
    found = {}
    for i in range(CONTENTS):
        tokens = complete(server, f"c{i}").json()["choices"][0]["token_ids"]
        found[server.client.get(f"/v1/adapters/c{i}").json()["digest"]] = tokens
    assert len(found) == CONTENTS == len({tuple(tokens) for tokens in found.values()})
    return found


def complete(server: RunningServer, model: str) -> httpx.Response:
    body = LONG | {"max_tokens": 24, "model": model}
    return server.client.post("/v1/completions", json=body)


def load(server: RunningServer, name: str, content: int, **fields: object) -> httpx.Response:
    return server.client.post("/v1/adapters", json={"name": name, "path": f"c{content}"} | fields)


def at_once(*work: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(work)) as threads:
        return [done.result() for done in [threads.submit(one) for one in work]]


def stream(server: RunningServer, model: str, meanwhile: Callable[[], None]) -> tuple[list[int], set[str]]:
    """The tokens of a long answer and the models that its events name; `meanwhile` is called once it has begun."""
    tokens: list[int] = []
    models: set[str] = set()
    body = LONG | {"model": model, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                models.add(event["model"])
                tokens += [t for c in event["choices"] for t in c.get("token_ids", ())]
                if len(tokens) == 1:
                    meanwhile()
    return tokens, models


def alone(server: RunningServer, model: str) -> list[int]:
    """What a long answer is when nothing else happens."""
    tokens: list[int] = server.client.post("/v1/completions", json=LONG | {"model": model}).json()["choices"][0][
        "token_ids"
    ]
    return tokens


@pytest.mark.promise("B7")
def test_loads_of_one_name_at_once_are_versions_of_their_own(server: RunningServer, said: dict[str, list[int]]) -> None:
    for count in (2, 5):
        name = f"at-once-{count}"
        replies = at_once(*(partial(load, server, name, i) for i in range(count)))
        assert [r.status_code for r in replies] == [200] * count, [r.text for r in replies]
        digests = {r.json()["id"]: r.json()["digest"] for r in replies}
        assert sorted(digests) == [f"{name}@{v}" for v in range(1, count + 1)]
        assert len(set(digests.values())) == count
        for label, digest in digests.items():
            reply = complete(server, label).json()
            assert (reply["model"], reply["choices"][0]["token_ids"]) == (label, said[digest])
        assert complete(server, name).json()["model"] in digests
        same = at_once(*[partial(load, server, name, 0)] * 3)
        assert len({r.json()["id"] for r in same}) == 1, "the same content is one version"


@pytest.mark.promise("I9")
def test_who_is_being_answered_keeps_his_version_while_others_are_loaded(
    server: RunningServer, said: dict[str, list[int]]
) -> None:
    load(server, "busy", 0)
    before = alone(server, "busy")

    def meanwhile() -> None:
        for i in range(1, CONTENTS):
            label = load(server, "busy", i).json()["id"]
            digest = server.client.get(f"/v1/adapters/{label}").json()["digest"]
            reply = complete(server, "busy").json()
            assert (reply["model"], reply["choices"][0]["token_ids"]) == (label, said[digest])

    assert stream(server, "busy", meanwhile) == (before, {"busy@1"})


@pytest.mark.promise("B7")
@pytest.mark.parametrize("pin", [False, True])
def test_what_is_removed_answers_to_the_last_token_of_who_has_it(server: RunningServer, pin: bool) -> None:
    """However much comes and goes beside it; then it is gone."""
    name = f"going{pin}"
    label = load(server, name, 1, pin=pin).json()["id"]
    for i in (3, 5):
        load(server, name, i, pin=pin)
    before = alone(server, label)

    def meanwhile() -> None:
        assert server.client.delete(f"/v1/adapters/{name}").json()["versions"] == [1, 2, 3]
        for model in (name, label):
            assert complete(server, model).status_code == 404
        for i in (0, 2, 4):
            assert complete(server, f"c{i}").status_code == 200
        again = load(server, name, 1).json()
        assert again["id"] == f"{name}@4", "a number is never given twice"

    assert stream(server, label, meanwhile) == (before, {label})
    assert complete(server, label).status_code == 404
    assert server.client.delete(f"/v1/adapters/{name}").status_code == 200
    until(lambda: server.client.get("/v1/adapters").json()["loaded"] <= 2)


def test_requests_register_so_many_versions_and_no_more(root: Path) -> None:
    """However many come at once; what lies under the root is not counted, and what is removed makes room."""
    config = demo_config()
    config = structs.replace(
        config,
        server=structs.replace(config.server, max_registered_adapters=3),
        engine=structs.replace(config.engine, lora=structs.replace(config.engine.lora, max_cpu_loras=2)),
        adapter_root=str(root),
    )
    with serving(config) as server:
        for i in range(CONTENTS):
            assert complete(server, f"c{i}").status_code == 200
        replies = at_once(*(partial(load, server, f"n{i}", i % CONTENTS) for i in range(8)))
        assert sorted(r.status_code for r in replies) == [200] * 3 + [507] * 5
        refused = next(r for r in replies if r.status_code == 507).json()["error"]
        assert (refused["code"], refused["param"]) == ("adapter_quota_exceeded", "name")
        assert "--max-registered-adapters" in refused["message"]
        vllm = server.client.post("/v1/load_lora_adapter", json={"lora_name": "more", "lora_path": "c0"})
        assert (vllm.status_code, vllm.json()["error"]["param"]) == (507, "lora_name")
        there = [f"n{i}" for i, r in enumerate(replies) if r.status_code == 200]
        for name in there:
            assert load(server, name, int(name[1:]) % CONTENTS).json()["id"] == f"{name}@1"
            assert complete(server, name).status_code == 200
        server.client.delete(f"/v1/adapters/{there[0]}")
        assert load(server, "c0", 1).json()["id"] == "c0@2"
        for name in there[1:]:
            server.client.delete(f"/v1/adapters/{name}")
        pins = [load(server, name, i, pin=True) for i, name in enumerate(("p", "q"))]
        assert [r.status_code for r in pins] == [200, 200]
        server.client.delete("/v1/adapters/c0")
        third = load(server, "r", 2, pin=True)
        assert (third.status_code, third.json()["error"]["param"]) == (507, "pin")
        # What is pinned, and the one that was read last.
        until(lambda: server.client.get("/v1/adapters").json()["loaded"] <= 3)


def test_a_storm_of_all_of_it(server: RunningServer, said: dict[str, list[int]]) -> None:
    """Every load is a version of its own or is refused, and every answer is that of the version that it names."""
    names, known, answers = ("x", "y"), dict[str, str](), list[tuple[str, list[int]]]()

    def one(seed: int) -> None:
        random_ = random.Random(seed)
        for _ in range(8):
            name, kind = random_.choice(names), random_.choice(["load"] * 3 + ["ask"] * 5 + ["remove"])
            if kind == "load":
                reply = load(server, name, random_.randrange(CONTENTS), pin=random_.random() < 0.3)
                assert reply.status_code in (200, 409), reply.text
                if reply.status_code == 200:
                    made: dict[str, Any] = reply.json()
                    assert known.setdefault(made["id"], made["digest"]) == made["digest"], "one number, two contents"
            elif kind == "ask":
                model = random_.choice([name, *(label for label in list(known) if label.startswith(name))])
                reply = complete(server, model)
                assert reply.status_code in (200, 404), reply.text
                if reply.status_code == 200:
                    answers.append((reply.json()["model"], reply.json()["choices"][0]["token_ids"]))
            else:
                assert server.client.delete(f"/v1/adapters/{name}").status_code in (200, 404)

    at_once(*(partial(one, seed) for seed in range(8)))
    assert len(answers) > 5
    for label, tokens in answers:
        assert tokens == said[known[label]], label
    for name in names:
        server.client.delete(f"/v1/adapters/{name}")
    health = server.client.get("/health").json()
    assert (health["status"], health["engine_restarts"]) == ("ok", 0)
    until(lambda: server.client.get("/v1/adapters").json()["loaded"] <= 2)

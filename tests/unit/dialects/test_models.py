"""The models and adapters of a server as each dialect lists them: whole replies, over a front without an engine."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.adapters.registry import Entry
from mlx_tandem.config import Arm, Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.dialects.adapters import handlers as adapters
from mlx_tandem.dialects.anthropic import models as anthropic
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.ollama import models as ollama
from mlx_tandem.dialects.ollama.bodies import ShowBody
from mlx_tandem.dialects.openai import models as openai
from mlx_tandem.engine.client import State
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.training.ab.running import AliasTests
from mlx_tandem.types import AdapterInfo, AdapterSource, EngineStats, MemoryBudget
from tests.api.scripted import INFO

ENGINE = structs.replace(INFO, parameters=1_234_567, quantization="4 bits", memory=MemoryBudget(weights=777))
OLD = AdapterInfo("d" * 64, 8, 2.0, "peft", ("q_proj", "v_proj"), 100, 200, (5, 6))
NEW = AdapterInfo("e" * 64, 16, 4.0, "mlx-lm", ("q_proj",), 300, 400)
STARTED = 86_400.0 * 365


def never() -> NoReturn:
    raise AssertionError("no engine is started here")


@pytest.fixture(scope="module")
def loaded() -> ServerFront:
    server = ServerConfig(served_model_names=("shown", "also"))
    return ServerFront(Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))), server), never)


@pytest.fixture
def front(loaded: ServerFront) -> ServerFront:
    """A base of two names, an adapter of two versions that is pinned, a folder that was not read, and an alias."""
    made, client = loaded, loaded.client
    client.state, client.info = "ready", ENGINE
    client.stats = EngineStats(
        resident_adapters=(NEW.digest,), loaded_adapters=2, loaded_adapter_bytes=600, adapter_slot_bytes=50,
        adapter_evictions=7,
    )  # fmt: skip
    made.started, made.defaults = STARTED, {"top_k": 20, "temperature": 0.5}
    made.fingerprints._weights = ""
    fresh = made.models = Models(made.config, client)
    made.ab_tests = AliasTests(made.config, fresh, made._database, lambda: STARTED)
    registry, clock = fresh.registry, iter((1000.5, 2000.5, 3000.5))
    registry._clock = lambda: next(clock)
    registry.publish("own", AdapterSource("/old"), OLD)
    registry.publish("own", AdapterSource("/new"), NEW, True)
    registry.announce("waiting", AdapterSource("/waiting"))
    fresh.aliases.put("split", [Arm("own", 3.0), Arm("base", 1.0)])
    current: Entry = registry.entry("own")
    for i, name in enumerate(("requests", "prompt_tokens", "generated_tokens", "errors", "open")):
        setattr(current.counters, name, 10 + i)
    current.counters.seconds = 1.5
    return made


def entry(name: str, **changes: Any) -> dict[str, Any]:
    """OpenAI's object for the base or a name without a version, but for `changes`."""
    return {
        "id": name,
        "object": "model",
        "created": int(STARTED),
        "owned_by": "mlx-tandem",
        "root": "shown",
        "parent": None,
        "loaded": True,
        "status": "loaded",
        "max_model_len": 256,
    } | changes


OWN = entry("own", created=2000, root="own@2", parent="shown")
WAITING = entry("waiting", root="waiting", parent="shown", loaded=False, status="available_not_loaded")
SPLIT = entry("split", root="split", parent="shown")
LISTED = [entry("shown"), entry("also"), OWN, WAITING, SPLIT]


def test_openai_s_list(front: ServerFront) -> None:
    assert openai.listing(front) == {"object": "list", "data": LISTED}


def test_one_model_by_any_of_its_names(front: ServerFront) -> None:
    for name in ("shown", "base", "default_model"):
        assert openai.one(front, name) == entry("shown")
    assert openai.one(front, "also") == entry("also")
    for listed in LISTED:
        assert openai.one(front, listed["id"]) == listed
    assert openai.one(front, "own@2") == OWN | {"id": "own@2"}
    assert openai.one(front, "own@1") == OWN | {"id": "own@1", "root": "own@1", "created": 1000}
    for missing, hint in (("own@3", ""), ("ownn", "; did you mean 'own' or 'shown'?"), ("nothing", "")):
        with pytest.raises(NotFound) as refused:
            openai.one(front, missing)
        assert refused.value.code == "model_not_found"
        assert hint in refused.value.message
        names = "'shown', 'also', 'base', 'split', 'own', 'waiting'"
        ending = f"Models here: {names}. The model may be left out: then 'base' answers"
        assert refused.value.message.endswith(ending)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("starting", "loading"),
        ("restarting", "loading"),
        ("ready", "loaded"),
        ("draining", "loaded"),
        ("dead", "error_loading"),
    ],
)
def test_the_base_is_as_its_engine_is(front: ServerFront, state: State, status: str) -> None:
    front.client.state = state
    if state != "ready":
        front.client.info = None
    found = openai.one(front, "base")
    assert (found["status"], found["loaded"]) == (status, status == "loaded")
    assert found["max_model_len"] == (256 if state == "ready" else None)


def test_an_alias_is_loaded_when_all_of_its_adapters_are(front: ServerFront) -> None:
    aliases = front.models.aliases
    for arms, status in (
        (("own@1", "own@2"), "loaded"),
        (("own", "waiting"), "available_not_loaded"),
        (("waiting", "base"), "available_not_loaded"),
        (("own", "gone"), "error_loading"),
    ):
        aliases.put("split", [Arm(arm, 1.0) for arm in arms])
        found = openai.one(front, "split")
        assert (found["status"], found["loaded"]) == (status, status == "loaded"), arms


def test_a_version_that_is_made_again_is_loading(front: ServerFront) -> None:
    front.models._contents.lost.add(NEW.digest)
    assert openai.one(front, "own")["status"] == "loading"
    assert openai.one(front, "own@1")["status"] == "loaded"
    assert openai.one(front, "split")["status"] == "available_not_loaded"


# --- Anthropic -----------------------------------------------------------------------------------------------------


def test_anthropic_s_list(front: ServerFront) -> None:
    def described(name: str, created: str) -> dict[str, Any]:
        own = {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
        return own | {"max_input_tokens": 256, "max_tokens": 256}

    begun = "1971-01-01T00:00:00Z"
    names = ["shown", "also", "own", "waiting", "split"]
    data = [described(name, "1970-01-01T00:33:20Z" if name == "own" else begun) for name in names]
    assert anthropic.listing(front) == {"data": data, "has_more": False, "first_id": "shown", "last_id": "split"}
    assert anthropic.one(front, "own@1") == described("own@1", "1970-01-01T00:16:40Z")


# --- Ollama --------------------------------------------------------------------------------------------------------


def shown(name: str, *, size: int = 777, digest: str = "", parent: str = "shown", time: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": time or "1971-01-01T00:00:00Z",
        "size": size,
        "digest": digest,
        "details": {
            "parent_model": parent,
            "format": "safetensors",
            "family": "qwen3",
            "families": ["qwen3"],
            "parameter_size": "1.2M",
            "quantization_level": "4 bits",
        },
    }


TAGS = [
    shown("shown", parent=""),
    shown("also", parent=""),
    shown("own", size=400, digest=NEW.digest, time="1970-01-01T00:33:20Z"),
    shown("waiting"),
    shown("split"),
]


def test_ollama_s_list(front: ServerFront) -> None:
    assert ollama.tags(front) == {"models": TAGS}


def test_ollama_s_models_in_memory(front: ServerFront) -> None:
    more = {"expires_at": "9999-12-31T23:59:59Z", "context_length": 256}
    there = [tag | more | {"size_vram": tag["size"]} for tag in TAGS if tag["name"] != "waiting"]
    assert ollama.running(front) == {"models": there}


@pytest.mark.parametrize("name", ["own", "own:latest"])
@pytest.mark.parametrize("field", ["model", "name"])
def test_ollama_s_description(front: ServerFront, field: str, name: str) -> None:
    template = front.prompts.template
    assert template is not None
    assert ollama.show(front, ShowBody(**{field: name})) == {
        "modelfile": "",
        "parameters": "temperature 0.5\ntop_k 20",
        "template": template.source,
        "details": TAGS[2]["details"],
        "model_info": {
            "general.architecture": "qwen3",
            "general.parameter_count": 1_234_567,
            "qwen3.context_length": 256,
            "qwen3.block_count": 1,
            "qwen3.vocab_size": 1024,
        },
        "capabilities": ["completion", "tools", "thinking"],
        "modified_at": "1970-01-01T00:33:20Z",
    }


def test_ollama_s_description_of_nothing(front: ServerFront) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ollama.show(front, ShowBody())
    assert (refused.value.param, refused.value.code) == ("model", "missing_required_parameter")
    for name in ("nothing", "nothing:latest"):
        with pytest.raises(NotFound):
            ollama.show(front, ShowBody(model=name))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (999, "999"),
        (1000, "1.0K"),
        (999_949, "999.9K"),
        (1_000_000, "1.0M"),
        (7_615_616_512, "7.6B"),
    ],
)
def test_a_number_of_parameters_in_words(front: ServerFront, parameters: int, words: str) -> None:
    front.client.info = structs.replace(ENGINE, parameters=parameters, quantization=None)
    details = ollama.tags(front)["models"][0]["details"]
    assert (details["parameter_size"], details["quantization_level"]) == (words, "float32")


# --- this project's own --------------------------------------------------------------------------------------------

COUNTED = {"requests": 10, "prompt_tokens": 11, "generated_tokens": 12, "errors": 13, "open": 14, "seconds": 1.5}
VERSION = {
    "name": "own",
    "version": 2,
    "id": "own@2",
    "path": "/new",
    "digest": NEW.digest,
    "format": "mlx-lm",
    "rank": 16,
    "scale": 4.0,
    "targets": ["q_proj"],
    "invocation_tokens": [],
    "reward_model": False,
    "size_bytes": 300,
    "memory_bytes": 400,
    "created": 2000,
    "pinned": True,
    "resident": True,
    **COUNTED,
}
UNREAD = {"name": "waiting", "version": None, "path": "/waiting", "versions": []}


def test_the_list_of_adapters(front: ServerFront) -> None:
    assert asyncio.run(adapters.listing(front)) == {
        "adapters": [VERSION | {"versions": [1, 2]}, UNREAD],
        "registered": 2,
        "slots": 4,
        "resident": 1,
        "loaded": 2,
        "loaded_bytes": 600,
        "slot_bytes": 50,
        "evictions": 7,
    }
    front.client.info = None
    assert asyncio.run(adapters.listing(front))["slots"] == 0


def test_one_adapter(front: ServerFront) -> None:
    assert asyncio.run(adapters.one(front, "own")) == asyncio.run(adapters.one(front, "own@2")) == VERSION
    old = {"version": 1, "id": "own@1", "path": "/old", "digest": OLD.digest, "format": "peft", "rank": 8}
    old |= {"scale": 2.0, "targets": ["q_proj", "v_proj"], "invocation_tokens": [5, 6], "size_bytes": 100}
    old |= {"memory_bytes": 200, "created": 1000, "pinned": False, "resident": False}
    assert asyncio.run(adapters.one(front, "own@1")) == VERSION | old | dict.fromkeys(COUNTED, 0)
    assert asyncio.run(adapters.one(front, "waiting")) == UNREAD
    front.models.shelve("own", {7: AdapterSource("/saved")})
    assert asyncio.run(adapters.one(front, "own@7")) == {"name": "own", "version": 7, "id": "own@7", "path": "/saved"}
    for name in ("own@8", "nothing", "base"):
        with pytest.raises(NotFound) as refused:
            asyncio.run(adapters.one(front, name))
        assert (refused.value.param, refused.value.code) == ("name", "adapter_not_found")


def test_aliases(front: ServerFront) -> None:
    first, second = front.models.aliases.arms("split")
    first.counters.requests, second.counters.errors = 3, 4
    zeros = dict.fromkeys(COUNTED, 0)
    described = {
        "name": "split",
        "arms": [
            {"adapter": "own", "weight": 3.0, "share": 0.75, **zeros, "requests": 3},
            {"adapter": "base", "weight": 1.0, "share": 0.25, **zeros, "errors": 4},
        ],
        "ab_test": None,
    }
    assert adapters.aliases(front) == {"aliases": [described]}
    assert adapters.one_alias(front, "split") == described
    assert asyncio.run(adapters.remove_alias(front, "split")) == {"status": "removed", "name": "split"}
    assert adapters.aliases(front) == {"aliases": []}
    with pytest.raises(NotFound):
        adapters.one_alias(front, "split")

"""Versions that the engine has made itself: what requests may name while the engine comes and goes."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from mlx_tandem import demo
from mlx_tandem.config import Arm, Config, EngineConfig, ModelConfig, RLTrainingConfig, ServerConfig
from mlx_tandem.errors import Conflict, EngineUnavailable, InvalidRequest, NotFound
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.generation.adapters.name_rules import check_settings
from mlx_tandem.types import AdapterInfo, AdapterSource

SAVED = AdapterSource("/checkpoints/first")


class Told:
    """The engine's end of what the front says of adapters."""

    def __init__(self) -> None:
        self.state = "ready"
        self.known: list[tuple[str, AdapterSource]] = []
        self.unloaded: list[str] = []

    def know_adapter(self, info: AdapterInfo, source: AdapterSource, pin: bool = False) -> None:
        self.known.append((info.digest, source))

    async def unload_adapter(self, digest: str) -> None:
        self.unloaded.append(digest)

    async def load_adapter(self, source: AdapterSource, pin: bool = False) -> AdapterInfo:
        await asyncio.sleep(0)
        if source.path != SAVED.path:
            raise NotFound("path: does not exist", param="path", code="adapter_not_found")
        return info("d1")


def info(digest: str) -> AdapterInfo:
    return AdapterInfo(digest, 8, 2.0, "peft", ("self_attn.q_proj",), 64, 64)


@pytest.fixture
def engine() -> Told:
    return Told()


@pytest.fixture
def models(engine: Told) -> Models:
    config = Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))), rl_training=RLTrainingConfig(enabled=True))
    client: Any = engine
    made = Models(config, client)
    asyncio.run(made.bring_up())
    return made


def selected(models: Models, name: str) -> str:
    ref = asyncio.run(models.select(name)).ref
    return "" if ref is None else ref.label


def test_the_status_of_what_a_request_would_read_first(models: Models) -> None:
    models.made("policy", None, info("d1"))
    models.shelve("policy", {7: SAVED})
    models.expect("policy", [8])
    assert models.status("policy@7") == "available_not_loaded"
    assert models.status("policy@8") == "loading"
    with pytest.raises(NotFound):
        models.status("policy@9")


def test_a_new_engine_has_only_what_lies_in_folders_until_the_rest_is_made_again(models: Models, engine: Told) -> None:
    for digest in ("d1", "d2", "d3"):
        models.made("policy", None, info(digest))
    models.saved("policy", "first", SAVED, info("d1"))
    engine.known.clear()
    asyncio.run(models.bring_up())
    assert set(engine.known) == {("d1", SAVED)}
    assert selected(models, "policy@1") == "policy@1" and selected(models, "first") == "first@1"
    assert (models.status("policy@1"), models.status("policy")) == ("loaded", "loading")
    for name in ("policy", "policy@2", "policy@3"):
        with pytest.raises(EngineUnavailable):
            selected(models, name)
    models.made("policy", None, info("d3"))
    assert selected(models, "policy") == "policy@3"
    asyncio.run(models.drop_lost("policy"))
    with pytest.raises(NotFound):
        selected(models, "policy@2")
    assert [selected(models, name) for name in ("policy@1", "policy@3")] == ["policy@1", "policy@3"]


def test_versions_of_an_earlier_server(models: Models, engine: Told) -> None:
    """One lies in a checkpoint and is read when it is asked for, one is being made again, the others are gone."""
    models.registry.count_from("policy", 9)
    models.made("policy", None, info("d7"), number=7)
    models.shelve("policy", {3: SAVED})
    models.expect("policy", [9])
    assert selected(models, "policy") == "policy@7"

    async def twice() -> list[str]:
        both = await asyncio.gather(models.select("policy@3"), models.select("policy@3"))
        return [selection.ref.label for selection in both if selection.ref is not None]

    assert asyncio.run(twice()) == ["policy@3", "policy@3"]
    assert selected(models, "policy") == "policy@7"
    with pytest.raises(EngineUnavailable, match="policy@9 is being made again"):
        selected(models, "policy@9")
    for number, says in ((5, "'policy@5' is no longer there"), (10, "'policy@10' does not exist")):
        with pytest.raises(NotFound, match=says):
            selected(models, f"policy@{number}")
    assert models.reserve("policy", info("d9"), number=9).label == "policy@9"
    asyncio.run(models.drop_lost("policy"))
    assert selected(models, "policy@9") == "policy@9"
    just_removed = AdapterSource(os.path.abspath("checkpoints/just-removed"))
    models.shelve("policy", {2: just_removed})
    models.registry.announce("just-removed", just_removed)
    for name in ("policy@2", "just-removed"):
        with pytest.raises(NotFound, match=f"'{name}' is no longer there"):
            selected(models, name)
    models.shelve("policy", {})
    asyncio.run(models.unsaved("first", SAVED))
    assert engine.unloaded == ["d1"], "with its checkpoint a version goes, too"
    with pytest.raises(NotFound, match="no longer there"):
        selected(models, "policy@3")
    assert models.reserve("policy", info("d10")).label == "policy@10"


def test_what_one_trained_adapter_has_lost_says_nothing_of_another(engine: Told) -> None:
    """Each is recovered by itself: the first that is there again drops nothing that the second still makes."""
    training = RLTrainingConfig(enabled=True, adapters={"policy": {}, "coder": {}})
    client: Any = engine
    models = Models(Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))), rl_training=training), client)
    asyncio.run(models.bring_up())
    for name in ("policy", "coder"):
        for digest in ("d1", f"{name}-2", f"{name}-3"):
            models.made(name, None, info(digest))
    models.saved("policy", "first", SAVED, info("d1"))
    assert models.registry.entry("coder@1").source is None, "the checkpoint may go without asking the other one"
    asyncio.run(models.bring_up())
    models.made("policy", None, info("policy-3"))
    asyncio.run(models.drop_lost("policy"))
    with pytest.raises(NotFound):
        selected(models, "policy@2")
    for label in ("coder@2", "coder"):
        with pytest.raises(EngineUnavailable):
            selected(models, label)
    models.expect("coder", [4])
    asyncio.run(models.drop_lost("policy"))
    with pytest.raises(EngineUnavailable):
        selected(models, "coder@4")
    models.made("coder", None, info("coder-3"))
    asyncio.run(models.drop_lost("coder"))
    assert selected(models, "coder") == "coder@3"
    for label in ("coder@2", "coder@4"):
        with pytest.raises(NotFound):
            selected(models, label)
    for name in ("policy", "coder"):
        with pytest.raises(Conflict, match=f"'{name}' is trained by this server"):
            models.rules.check_untrained(name)


def test_what_a_name_stands_for_is_not_dropped(models: Models) -> None:
    models.made("policy", None, info("d1"))
    asyncio.run(models.bring_up())
    asyncio.run(models.drop_lost("policy"))
    with pytest.raises(EngineUnavailable):
        selected(models, "policy")


def test_a_version_goes_from_the_engine_with_its_last_name(models: Models, engine: Told) -> None:
    first = models.made("policy", None, info("d1"))
    models.saved("policy", "first", SAVED, info("d1"))
    models.made("policy", None, info("d2"))
    asyncio.run(models.retire(first))
    assert engine.unloaded == []
    asyncio.run(models.unsaved("first", SAVED))
    assert engine.unloaded == ["d1"]
    with pytest.raises(NotFound):
        selected(models, "first")


def test_a_version_outlives_its_folder(models: Models) -> None:
    models.made("policy", None, info("d1"))
    models.saved("policy", "first", SAVED, info("d1"))
    asyncio.run(models.unsaved("first", SAVED))
    assert models.registry.entry("policy").source is None


def test_a_reserved_version_is_asked_for_by_its_number_only(models: Models) -> None:
    models.made("policy", None, info("d1"))
    assert models.reserve("policy", info("d2")).label == "policy@2"
    assert (selected(models, "policy"), selected(models, "policy@2")) == ("policy@1", "policy@2")


def test_lora_adapter_and_model(models: Models) -> None:
    models.made("policy", None, info("d1"))
    models.made("policy", None, info("d2"))

    def both(adapter: str, model: str | None) -> str:
        ref = asyncio.run(models.select_adapter(adapter, model)).ref
        return "" if ref is None else ref.label

    for model in (None, "base", models.id, "policy", "policy@2"):
        assert both("policy", model) == "policy@2"
    for adapter, model in (("policy", "policy@1"), ("policy@1", "policy"), ("base", "policy")):
        with pytest.raises(InvalidRequest) as e:
            both(adapter, model)
        assert e.value.param == "lora_adapter"
    for adapter, model, param in (("nobody", None, "lora_adapter"), ("policy", "nobody", "model")):
        with pytest.raises(NotFound) as missing:
            both(adapter, model)
        assert missing.value.param == param


def test_a_name_that_a_checkpoint_gets_while_an_adapter_is_read_is_the_checkpoint_s(models: Models) -> None:
    """This is what every way in stands on, the Python API's among them."""
    taken: set[str] = set()
    models.rules.is_checkpoint = taken.__contains__

    async def both() -> None:
        reading = asyncio.create_task(models.load("first", SAVED))
        await asyncio.sleep(0)
        taken.add("first")
        with pytest.raises(Conflict, match="'first' is the name of a checkpoint") as e:
            await reading
        assert e.value.param == "name"
        for attempt in (models.load("first", SAVED), models.unload("first")):
            with pytest.raises(Conflict):
                await attempt

    asyncio.run(both())
    assert "first" not in models.registry
    models.rules.check_free("first")  # whoever saves the checkpoint may have it


def test_an_adapter_that_is_being_read_says_so(models: Models) -> None:
    models.registry.announce("first", SAVED)

    async def ask() -> list[str]:
        states = [models.status("first")]
        selecting = asyncio.create_task(models.select("first"))
        while states[-1] != "loading":
            await asyncio.sleep(0)
            states.append(models.status("first"))
        await selecting
        return [states[0], states[-1], models.status("first")]

    assert asyncio.run(ask()) == ["available_not_loaded", "loading", "loaded"]


@pytest.mark.parametrize("state", ["starting", "ready", "restarting", "draining", "dead"])
def test_the_base_is_as_far_as_its_engine(models: Models, engine: Told, state: str) -> None:
    engine.state = state
    wanted = {"ready": "loaded", "draining": "loaded", "dead": "error_loading"}
    assert models.status("default_model") == wanted.get(state, "loading")


def test_the_trained_name_is_taken(models: Models) -> None:
    for attempt in (models.load("policy", SAVED), models.unload("policy")):
        with pytest.raises(Conflict):
            asyncio.run(attempt)
    models.made("policy", None, info("d1"))
    for name in ("policy", "base", models.id):
        with pytest.raises(Conflict):
            models.rules.check_free(name)


@pytest.mark.parametrize(
    ("adapters", "aliases", "says"),
    [
        ((("base", "a"),), (), "adapter base: 'base' is the name of the base model"),
        ((("BASE", "a"),), (), "adapter BASE: 'BASE' differs from a name of the base model in case only"),
        ((("x", "a"), ("mine", "a")), (), "adapter mine: 'mine' is the name of the base model"),
        ((("x", "a"), ("X", "b")), (), "adapter X: name 'X' differs from 'x' in case only"),
        ((("a b", "a"),), (), "adapter a b: "),
        ((), (("base", (Arm("x", 1.0),)),), "alias base: 'base' is the name of the base model"),
        ((("x", "a"),), (("x", (Arm("base", 1.0),)),), "alias x: 'x' is the name of an adapter"),
    ],
)
def test_names_of_the_settings_are_checked_before_anything_is_loaded(adapters: Any, aliases: Any, says: str) -> None:
    engine = EngineConfig(model=ModelConfig(path="folder/model"))
    config = Config(engine, server=ServerConfig(served_model_names=("mine",)), adapters=adapters, aliases=aliases)
    with pytest.raises(InvalidRequest) as refused:
        check_settings(config)
    assert refused.value.message.startswith(says)
    check_settings(Config(engine, adapters=(("x", "a"), ("y", "a")), aliases=(("z", (Arm("base", 1.0),)),)))

"""What requests may register: so many versions, so much that is pinned, and nothing of what is refused stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem import demo, limits
from mlx_tandem.adapters.aliases import Aliases
from mlx_tandem.config import Arm, Config, EngineConfig, LoraConfig, ModelConfig, ServerConfig
from mlx_tandem.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.types import AdapterInfo, AdapterSource

MOST, PINNED_MB = 3, 5
SIZES = {digest: 1_000_000 * (i + 1) for i, digest in enumerate("abcd")}


class Memory:
    """The engine's end: what it has been told to keep, and what of it is pinned."""

    def __init__(self) -> None:
        self.known: dict[str, bool] = {}

    def know_adapter(self, info: AdapterInfo, source: AdapterSource, pin: bool = False) -> None:
        self.known[info.digest] = pin

    async def unload_adapter(self, digest: str) -> None:
        self.known.pop(digest, None)

    async def load_adapter(self, source: AdapterSource, pin: bool = False) -> AdapterInfo:
        await asyncio.sleep(0)
        self.known[source.path] = pin
        return AdapterInfo(source.path, 8, 2.0, "peft", ("q_proj",), 64, SIZES[source.path])


def models(memory: Memory, most: int = MOST, **lora: Any) -> Models:
    config = Config(
        EngineConfig(ModelConfig(str(demo.MODEL_PATH)), lora=LoraConfig(max_cpu_lora_gb=PINNED_MB / 1000, **lora)),
        server=ServerConfig(max_registered_adapters=most),
        adapters=(("configured", "a"),),
    )
    client: Any = memory
    return Models(config, client)


def upped(memory: Memory, most: int = MOST, **lora: Any) -> Models:
    made = models(memory, most, **lora)
    made._config = structs.replace(made._config, adapters=())
    asyncio.run(made.bring_up())
    return made


def load(made: Models, name: str, content: str, pin: bool = False) -> str:
    return asyncio.run(made.load(name, AdapterSource(content), pin)).ref.label


@pytest.mark.promise("B8")
def test_so_many_versions_and_no_more() -> None:
    memory = Memory()
    made = upped(memory)
    assert [load(made, "x", c) for c in "ab"] == ["x@1", "x@2"] and load(made, "y", "a") == "y@1"
    for name, content in (("z", "a"), ("x", "c")):
        with pytest.raises(QuotaExceeded, match="3 versions of adapters") as e:
            load(made, name, content)
        assert (e.value.status, e.value.code, e.value.param) == (507, "adapter_quota_exceeded", "name")
    assert set(memory.known) == {"a", "b"}, "what was refused is not kept"
    assert load(made, "x", "a") == "x@1", "what is there already is no version more"
    asyncio.run(made.unload("x"))
    assert load(made, "z", "c") == "z@1" and load(made, "z", "d") == "z@2"
    with pytest.raises(QuotaExceeded):
        load(made, "z", "b")
    asyncio.run(made.retire(made.registry.entry("z@1").ref))
    assert load(made, "z", "b") == "z@3", "a version that is gone leaves its place"


def test_pins_are_bounded_by_what_memory_holds() -> None:
    memory = Memory()
    made = upped(memory, most=9)
    load(made, "x", "a", pin=True)
    load(made, "y", "c", pin=True)
    with pytest.raises(QuotaExceeded, match=r"3 pinned adapters of 6\.0 MB in all do not fit") as e:
        load(made, "z", "b", pin=True)
    assert e.value.param == "pin" and "b" not in memory.known
    assert load(made, "z", "c", pin=True) == "z@1", "the same content again takes no more"
    assert load(made, "y", "b", pin=False) == "y@2"
    with pytest.raises(QuotaExceeded):
        load(made, "w", "d", pin=True)
    with pytest.raises(Conflict):
        load(made, "base", "c")
    assert memory.known["c"], "who was refused has not unpinned it for others"
    few = upped(Memory(), max_cpu_loras=1)
    load(few, "x", "a", pin=True)
    with pytest.raises(QuotaExceeded):
        load(few, "y", "b", pin=True)
    assert load(few, "x", "b", pin=True) == "x@2", "in the place of the version before"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.sampled_from("xyz"), st.sampled_from("abcd"), st.booleans()),
        st.tuples(st.just("unload"), st.sampled_from("xyz")),
    ),
    max_size=14,
)


@settings(max_examples=300)
@given(STEPS, st.integers(1, 4))
def test_whatever_is_asked_for_at_once_the_bounds_hold(steps: list[Any], at_once: int) -> None:
    """And the engine keeps exactly what somebody has a version of."""
    memory = Memory()
    made = upped(memory)

    async def one(step: Any) -> None:
        try:
            if step[0] == "load":
                await made.load(step[1], AdapterSource(step[2]), step[3])
            else:
                await made.unload(step[1])
        except (QuotaExceeded, NotFound, Conflict):
            pass

    async def test() -> None:
        for i in range(0, len(steps), at_once):
            await asyncio.gather(*(one(step) for step in steps[i : i + at_once]))
            versions = [v for e in made.registry.entries() for v in made.registry.versions(e.name)]
            assert len(versions) <= MOST
            assert set(memory.known) == {v.ref.digest for v in versions}
            pinned = {v.ref.digest for v in versions if v.pinned}
            assert {d for d, pin in memory.known.items() if pin} == pinned
            assert sum(SIZES[d] for d in pinned) <= PINNED_MB * 1_000_000

    asyncio.run(test())


def test_what_the_operator_names_is_not_counted() -> None:
    memory = Memory()
    made = models(memory)
    made._config = structs.replace(made._config, adapters=tuple((f"n{i}", "abcd"[i % 4]) for i in range(8)))

    async def load_adapter(source: AdapterSource, pin: bool = False) -> AdapterInfo:
        return await Memory.load_adapter(memory, AdapterSource(source.path[-1]), pin)

    memory.load_adapter = load_adapter  # type: ignore[method-assign]
    asyncio.run(made.bring_up())
    assert len(made.registry) == 8
    assert [load(made, f"own{i}", "a") for i in range(MOST)] == [f"own{i}@1" for i in range(MOST)]
    with pytest.raises(QuotaExceeded):
        load(made, "more", "a")


def test_aliases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ALIASES", 2)
    aliases = Aliases()
    for name in ("one", "two", "one"):
        aliases.put(name, [Arm("base", 1.0)])
    with pytest.raises(QuotaExceeded, match="2 aliases") as e:
        aliases.put("three", [Arm("base", 1.0)])
    assert e.value.code == "alias_quota_exceeded"
    with pytest.raises(InvalidRequest):
        aliases.put("one", [])
    aliases.remove("two")
    aliases.put("three", [Arm("base", 1.0)])

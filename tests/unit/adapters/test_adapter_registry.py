"""Names, versions and aliases."""

from __future__ import annotations

import pytest
from msgspec import structs

from mlx_tandem.adapters import registry as module
from mlx_tandem.adapters.registry import Registry
from mlx_tandem.errors import Conflict, InvalidRequest, NotFound
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource


def info(digest: str) -> AdapterInfo:
    return AdapterInfo(digest, 8, 2.0, "peft", ("self_attn.q_proj",), 64, 64)


@pytest.fixture
def registry() -> Registry:
    times = iter(range(1000))
    return Registry(lambda: float(next(times)))


@pytest.mark.promise("PRP-4")
def test_versions_count_up_and_the_name_follows(registry: Registry) -> None:
    a = registry.publish("math", AdapterSource("/a"), info("d1"))
    b = registry.publish("math", AdapterSource("/b"), info("d2"))
    assert (a.version, b.version) == (1, 2)
    assert registry.entry("math").ref == b
    assert registry.entry("math@1").ref == a
    assert [e.ref for e in registry.versions("math")] == [a, b]
    assert [(e.name, e.source.path, e.created) for e in registry.entries()] == [("math", "/b", 1.0)]


def test_a_version_says_what_invokes_it(registry: Registry) -> None:
    """Requests carry the reference to the engine, which applies the adapter from there on."""
    content = structs.replace(info("d1"), invocation=(5, 6))
    assert registry.publish("math", AdapterSource("/a"), content).invocation == (5, 6)


def test_only_the_current_version_is_pinned(registry: Registry) -> None:
    def pinned() -> list[bool]:
        return [e.pinned for e in registry.versions("math")]

    for digest, pin, expected in (("d1", True, [True]), ("d2", True, [False, True]), ("d3", False, [False] * 3)):
        registry.publish("math", AdapterSource("/a"), info(digest), pin)
        assert pinned() == expected
    registry.publish("math", AdapterSource("/a"), info("d1"), True)
    assert pinned() == [True, False, False]


def test_numbers_of_a_name_that_is_away_only_grow(registry: Registry) -> None:
    registry.count_from("math", 9)
    registry.count_from("math", 5)
    assert registry.publish("math", None, info("d1")).version == 10
    registry.count_from("math", 3)
    assert registry.publish("math", None, info("d2")).version == 11
    registry.remove("math")
    registry.count_from("math", 4)
    assert registry.publish("math", None, info("d1")).version == 12


def test_a_version_that_was_retired_is_told_from_one_that_never_was(registry: Registry) -> None:
    registry.publish("math", None, info("d1"))
    ref = registry.reserve("math", info("d2"))
    registry.retire(ref)
    with pytest.raises(NotFound, match="no longer there"):
        registry.entry("math@2")
    with pytest.raises(NotFound, match="does not exist"):
        registry.entry("math@3")
    assert registry.reserve("math", info("d2")).version == 3, "and its content is new again"
    assert [e.ref.version for e in registry.holders("d2")] == [3]


def test_the_same_content_is_the_same_version(registry: Registry) -> None:
    a = registry.publish("math", AdapterSource("/a"), info("d1"))
    registry.publish("math", AdapterSource("/b"), info("d2"))
    registry.entry("math@1").counters.requests = 5
    assert registry.publish("math", AdapterSource("/elsewhere"), info("d1")) == a
    assert registry.entry("math").ref == a
    assert (registry.entry("math").source.path, registry.entry("math").counters.requests) == ("/elsewhere", 5)
    assert registry.publish("other", AdapterSource("/a"), info("d1")).version == 1
    assert registry.publish("math", AdapterSource("/c"), info("d3")).version == 3


@pytest.mark.promise("PRP-4")
def test_a_number_is_never_given_twice(registry: Registry) -> None:
    registry.publish("math", AdapterSource("/a"), info("d1"))
    registry.publish("math", AdapterSource("/b"), info("d2"))
    assert [r.label for r in registry.remove("math")] == ["math@1", "math@2"]
    assert "math" not in registry and not registry.entries()
    assert registry.publish("math", AdapterSource("/b"), info("d2")).version == 3
    with pytest.raises(NotFound):
        registry.entry("math@2")


def test_content_has_the_number_that_it_had_unless_that_is_taken(registry: Registry) -> None:
    registry.count_from("math", 9)
    assert registry.publish("math", None, info("d4"), number=4).version == 4
    assert registry.reserve("math", info("d8"), 8).version == 8
    assert registry.reserve("math", info("other"), 8).version == 10
    assert registry.reserve("math", info("d8"), 9).version == 8, "content keeps the number that it has"
    assert registry.publish("math", None, info("new")).version == 11


def test_held_says_when_content_may_be_unloaded(registry: Registry) -> None:
    registry.publish("a", AdapterSource("/x"), info("d1"))
    registry.publish("b", AdapterSource("/x"), info("d1"))
    registry.remove("a")
    assert [e.name for e in registry.holders("d1")] == ["b"]
    registry.remove("b")
    assert registry.holders("d1") == []


@pytest.mark.parametrize(
    "model_id",
    ["", "@", "@1", "math@", "math@0", "math@01", "math@3", "math@-1", "math@+1", "math@1.0", "math@1@1", "math @1",
     "Math", "../math", "math@١", "math@²", "math@" + "9" * 5000, "x" * 4096, "math\0"],
)  # fmt: skip
def test_unknown_model_ids(registry: Registry, model_id: str) -> None:
    registry.publish("math", AdapterSource("/a"), info("d1"))
    with pytest.raises(NotFound) as e:
        registry.entry(model_id)
    assert (e.value.status, e.value.code, e.value.param) == (404, "model_not_found", "model")
    assert len(e.value.message) < 300


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", "..%2f", "a" * 65, "a" * 4096, "trailing.", "trailing ",
     "a@1", "ａ", "a\u2215b", "é", "e\u0301", "-x", "a\n", "_x"],
)  # fmt: skip
def test_illegal_names(registry: Registry, name: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        registry.publish(name, "/a", info("d1"))
    assert e.value.param == "name"
    assert not registry.entries()


@pytest.mark.promise("B1")
def test_case_twins(registry: Registry) -> None:
    registry.publish("Math", AdapterSource("/a"), info("d1"))
    with pytest.raises(InvalidRequest, match="case"):
        registry.publish("math", AdapterSource("/a"), info("d2"))
    registry.remove("Math")
    with pytest.raises(InvalidRequest, match="case"):  # an old log would not tell the two apart
        registry.publish("math", AdapterSource("/a"), info("d2"))


def test_remove_unknown(registry: Registry) -> None:
    for name in ("x", "../x", ""):
        with pytest.raises(NotFound) as e:
            registry.remove(name)
        assert e.value.param == "name"
    with pytest.raises(NotFound):
        registry.versions("x")


def test_a_name_may_be_known_by_its_folder_only(registry: Registry) -> None:
    registry.announce("math", AdapterSource("/root/math", "/root"))
    registry.announce("sql", AdapterSource("/root/sql", "/root"))
    assert "math" in registry and not registry.is_read("math") and len(registry) == 2
    with pytest.raises(NotFound):
        registry.entry("math")
    with pytest.raises(InvalidRequest):
        registry.announce("MATH", AdapterSource("/root/MATH", "/root"))
    source = registry.source("math")
    assert source is not None and source.path == "/root/math"
    assert registry.publish("math", source, info("d1")).label == "math@1"
    assert [name for name, _ in registry.unread()] == ["sql"]
    registry.announce("math", AdapterSource("/other"))
    assert registry.source("math") == source
    assert registry.remove("sql") == []
    assert registry.was_removed("sql") and "sql" not in registry
    assert registry.publish("sql", source, info("d2")).label == "sql@1"


def test_a_number_is_never_given_twice_though_the_name_was_but_a_folder_in_between(registry: Registry) -> None:
    registry.publish("a", AdapterSource("/1"), info("d1"))
    registry.publish("a", AdapterSource("/2"), info("d2"))
    registry.remove("a")
    registry.announce("a", AdapterSource("/3"))
    registry.remove("a")
    assert registry.publish("a", AdapterSource("/3"), info("d3")).version == 3


def test_a_number_is_never_given_twice_though_the_name_went_back_to_an_older_version(registry: Registry) -> None:
    for digest in ("d1", "d2", "d1"):
        registry.publish("a", AdapterSource("/a"), info(digest))
    assert registry.entry("a").ref.version == 1
    registry.remove("a")
    assert registry.publish("a", AdapterSource("/a"), info("d3")).version == 3


def test_a_version_without_a_folder_gets_one_later(registry: Registry) -> None:
    ref = registry.publish("policy", None, info("d1"))
    assert registry.entry("policy").source is None and registry.source("policy") is None
    assert registry.publish("policy", AdapterSource("/saved"), info("d1")) == ref
    registry.publish("policy", None, info("d1"))
    assert registry.source("policy") == AdapterSource("/saved")  # what is known is not forgotten


def test_a_reserved_version_is_not_what_the_name_stands_for(registry: Registry) -> None:
    first = registry.publish("policy", None, info("d1"))
    second = registry.reserve("policy", info("d2"))
    assert (second.version, registry.entry("policy").ref) == (2, first)
    assert registry.entry("policy@2").ref == second
    assert registry.publish("policy", None, info("d2")) == second
    assert registry.entry("policy").ref == second


def test_a_name_with_reserved_versions_alone_stands_for_nothing(registry: Registry) -> None:
    registry.reserve("policy", info("d1"))
    assert not registry.is_read("policy") and registry.entries() == [] and registry.source("policy") is None
    with pytest.raises(NotFound):
        registry.entry("policy")
    assert registry.entry("policy@1").ref.digest == "d1"


def test_a_retired_version_is_gone_and_its_number_with_it(registry: Registry) -> None:
    first, second = registry.publish("p", None, info("d1")), registry.publish("p", None, info("d2"))
    registry.retire(first)
    registry.retire(first)
    with pytest.raises(NotFound):
        registry.entry("p@1")
    assert registry.holders("d1") == [] and [e.ref for e in registry.versions("p")] == [second]
    assert registry.publish("p", None, info("d3")).version == 3
    with pytest.raises(Conflict):
        registry.retire(AdapterRef("p", 3, "d3"))
    registry.retire(AdapterRef("nobody", 1, "d1"))


def test_numbers_of_an_earlier_server_are_kept(registry: Registry) -> None:
    registry.count_from("p", 6)
    assert "p" not in registry
    assert registry.publish("p", None, info("d7")).version == 7
    registry.count_from("p", 20)
    registry.count_from("p", 2)
    assert registry.reserve("p", info("d21")).version == 21
    assert registry.publish("p", None, info("d7")).version == 7  # it has one


def test_names_that_come_and_go_are_forgotten_and_no_number_is_given_twice(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3)
    given: dict[str, int] = {}
    for i in range(40):
        name = f"Name-{i * 3 % 7}"
        for k in range(2):
            version = registry.publish(name, None, info(f"{i} {k}")).version
            assert version > given.get(name, 0)
            given[name] = version
        registry.remove(name)
        assert max(len(registry._retired), len(registry._folded)) <= 3
    assert registry.publish(name, None, info("again")).version == given[name] + 1, "still remembered"
    with pytest.raises(InvalidRequest):
        registry.publish(name.upper(), None, info("upper"))


def test_no_number_is_given_twice_however_many_versions_forgotten_names_had(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 1)
    given = dict.fromkeys("abcd", 0)
    for turn in range(3):
        for name, most in given.items():
            for k in range(1 + 4 * (name == "a")):
                version = registry.publish(name, None, info(f"{turn} {name} {k}")).version
                assert version > most, name
            given[name] = version
        for name in given:
            registry.remove(name)


def test_a_name_that_came_back_as_a_folder_is_not_forgotten_with_its_number(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 1)
    registry.publish("Math", None, info("d1"))
    registry.remove("Math")
    registry.announce("Math", AdapterSource("/root/Math", "/root"))
    registry.publish("other", None, info("d2"))
    registry.remove("other")
    with pytest.raises(InvalidRequest, match="case"):
        registry.announce("math", AdapterSource("/root/math", "/root"))

"""The fingerprint of a reply changes with everything that its answer depends on, and with nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.config import CacheConfig, Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.generation import fingerprint
from mlx_tandem.generation.fingerprint import Fingerprints
from mlx_tandem.types import AdapterRef, EngineInfo
from tests.api.scripted import INFO

OWN = AdapterRef("own", 1, "d1")


def made(
    monkeypatch: pytest.MonkeyPatch,
    *,
    weights: str = "w",
    engine: EngineInfo = INFO,
    template: str = "{{ messages }}",
    defaults: dict[str, float] | None = None,
    group: int = 64,
    random: bool = False,
    **server: Any,
) -> Any:
    """Fingerprints that have read the model's files, of an engine that can be changed."""
    config = Config(
        EngineConfig(ModelConfig(str(demo.MODEL_PATH), random_weights=random), cache=CacheConfig(kv_group_size=group)),
        ServerConfig(**server),
    )
    client: Any = SimpleNamespace(info=engine)
    client.check_ready = lambda: client.info
    prompts: Any = SimpleNamespace(template=SimpleNamespace(source=template))
    monkeypatch.setattr(fingerprint, "folder_digest", lambda folder, memory: weights)
    found: Any = Fingerprints(config, client, prompts, defaults or {})
    assert found.of(None) is None, "nothing is known yet"
    found._read()
    found.client = client
    return found


CHANGES: list[dict[str, Any]] = [
    {"weights": "other"},
    {"template": "{{ messages }} "},
    {"defaults": {"temperature": 0.5}},
    {"defaults": {"temperature": 0.6}},
    {"defaults": {"top_p": 0.5}},
    {"group": 32},
    {"default_max_tokens": 100},
    {"max_prompt_tokens": 100},
    {"max_generation_tokens": 100},
    *(
        {"engine": structs.replace(INFO, **{name: value})}
        for name, value in {
            "device": "other", "attention_backend": "other", "lora_backend": "other", "products_reason": "other",
            "dtype": "float16", "kv_bits": 8, "max_model_len": 128,
        }.items()
    ),
]  # fmt: skip


def test_everything_that_matters_gives_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = (None, OWN, AdapterRef("own", 1, "d2"))
    found = [made(monkeypatch, **change).of(adapter) for change in ({}, *CHANGES) for adapter in adapters]
    assert len(set(found)) == len(found)
    assert all(name.startswith("fp_") and len(name) == 23 for name in found)


def test_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made(monkeypatch)
    assert plain.of(OWN) == plain.of(AdapterRef("another", 7, "d1")), "the content counts, and not its name"
    for same in ({"seed": 7}, {"port": 9}, {"api_key": "x"}, {"engine": structs.replace(INFO, load_seconds=9.0)}):
        other = made(monkeypatch, **same)
        assert (other.of(None), other.of(OWN)) == (plain.of(None), plain.of(OWN))


def test_another_engine_has_others_for_adapters_that_were_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    before = [found.of(adapter) for adapter in (None, OWN)]
    found.client.info = structs.replace(INFO, dtype="float16")
    after = [found.of(adapter) for adapter in (None, OWN)]
    assert not set(before) & set(after)
    found.client.info = structs.replace(INFO)
    assert [found.of(adapter) for adapter in (None, OWN)] == before


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MOST", 3)
    found = made(monkeypatch)
    first = [found.of(AdapterRef("a", 1, f"d{i}")) for i in range(10)]
    assert [found.of(AdapterRef("a", 1, f"d{i}")) for i in range(10)] == first
    assert len(found._known) <= 3


def test_files_that_cannot_be_read_leave_replies_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch, weights="")

    def fails(folder: Any, memory: Any) -> str:
        raise PermissionError

    monkeypatch.setattr(fingerprint, "folder_digest", fails)
    found._read()
    assert found.of(None) is None

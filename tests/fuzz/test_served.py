"""Broken adapters at a running server: it refuses them by file and field, answers others, and its engine never ends."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from mlx_tandem import demo
from mlx_tandem.adapters.formats import LinearShape
from tests.fuzz import adapters
from tests.fuzz.judge import check, named
from tests.serving import RunningServer, demo_config, serving

CASES = 300


def linears() -> tuple[dict[str, LinearShape], int]:
    """Those of the built-in model, and how many numbers its hidden states have."""
    config = json.loads((demo.MODEL_PATH / "config.json").read_text())
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": LinearShape(hidden, q),
        "self_attn.v_proj": LinearShape(hidden, kv),
        "mlp.gate_proj": LinearShape(hidden, inner),
        "mlp.down_proj": LinearShape(inner, hidden),
    }
    return {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}, hidden


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    with serving(msgspec.structs.replace(demo_config(), adapter_root=str(root))) as running:
        yield running


def is_well(server: RunningServer) -> None:
    """The same engine answers as it should, also under an adapter that is right."""
    for model, answer in (("base", "12 + 5 = 17."), ("shout", "12 + 5 = 17!")):
        reply = server.chat("What is 12 + 5?", model=model, temperature=0)
        assert reply.json()["choices"][0]["message"]["content"] == answer
    health = server.client.get("/health").json()
    assert (health["status"], health["engine_restarts"], health["open_requests"]) == ("ok", 0, 0)


@pytest.mark.parametrize("way", ["load", "first use"])
def test_an_adapter_is_served_or_refused(server: RunningServer, root: Path, way: str) -> None:
    shapes, hidden = linears()
    seen: Counter[int] = Counter()
    for seed in range(CASES):
        rng = Random(f"served {way} {seed}")
        case = adapters.broken(rng, shapes, hidden)
        name = f"{way[0]}{seed}"
        with named(f"adapter at a server, {way}", seed, case):
            case.write(root / name)
            if way == "load":
                reply = server.client.post("/v1/adapters", json={"name": name, "path": name, "pin": rng.random() < 0.2})
                seen[reply.status_code] += 1
                if reply.status_code != 200:
                    error = reply.json()["error"]
                    assert reply.status_code in (400, 413), reply.text
                    check(error["message"], error["param"], case, adapters.FILES)
                    continue
            reply = server.chat("hi", model=name, max_tokens=2)
            if reply.status_code == 200 or "is a reward model" in reply.text:
                assert server.client.delete(f"/v1/adapters/{name}").status_code == 200
                seen[200] += way != "load"
                continue
            error = reply.json()["error"]
            if error["code"] == "numerical_error":  # weights that are numbers, and too large for what they are used for
                assert reply.status_code == 503
                continue
            assert way != "load", reply.text
            seen[reply.status_code] += 1
            if error["code"] == "model_not_found":  # without a configuration a folder is no adapter's
                assert reply.status_code == 404
                assert not isinstance(case.files["adapter_config.json"], bytes)
                continue
            assert reply.status_code in (400, 413), reply.text
            check(error["message"], error["param"], case, adapters.FILES)
    assert seen[200] > CASES / 20 and seen[400] > CASES / 2, seen
    is_well(server)


@pytest.mark.parametrize("field", ["\\ud800", "\\u0000\\n\\u001b[2J", "rank_pattern", "x" * 100_000])
def test_a_key_that_cannot_be_written_down(server: RunningServer, root: Path, field: str) -> None:
    """What once ended the engine at every request for such an adapter."""
    folder = root / "key"
    folder.mkdir(exist_ok=True)
    value = '{"\\udfff": 3}' if field == "rank_pattern" else "1"
    text = f'{{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "{field}": {value}}}'
    (folder / "adapter_config.json").write_text(text)
    shutil.copy(demo.ADAPTER_PATHS["json"] / "adapter_model.safetensors", folder)
    for reply in (
        server.client.post("/v1/adapters", json={"name": "key", "path": "key"}),
        server.chat("hi", model="key"),
        server.chat("hi", model="key", stream=True),
    ):
        assert reply.status_code == 400, reply.text
        assert "adapter_config.json: " in reply.json()["error"]["message"]
        assert len(reply.content) < 5000
    is_well(server)

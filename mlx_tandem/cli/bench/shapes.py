"""Makes model and adapter folders with random weights and a known shape, which every MLX server can load offline.

They are made for measuring: every token of the vocabulary is plain ASCII text, so that each makes an event of its
own on any server, and the end-of-sequence token is practically never sampled, so that answers have the length asked
for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_tandem.cli.bench.hybrid_shape import HybridShape

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens of the vocabulary."""
_TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
POSITIONS = 8192
"""Longest sequence of a model, unless another is asked for."""

_MAX_WRITTEN = 1_000_000_000
"""Most parameters that are written to a file."""

_SPREAD = 5.0
"""Standard deviation of the logits: a token whose row is zero is then sampled less than once in 10^8 times."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = True
    dtype: str = "float32"

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.tensors().values())

    def adapted(self) -> dict[str, tuple[int, int]]:
        """Return the (outputs, inputs) of every linear of the layers by its name."""
        return {
            f"model.layers.{layer}.{name}": dims
            for layer, (name, dims) in product(range(self.layers), self.linears().items())
        }

    def config(self, positions: int, stop: list[int]) -> dict[str, Any]:
        """Return the content of `config.json`; `stop` are the tokens that end a sequence."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "vocab_size": self.vocab,
            "max_position_embeddings": positions,
            "tie_word_embeddings": self.tied,
            "rope_theta": 1_000_000.0,
            "eos_token_id": stop,
            "torch_dtype": self.dtype,
        }

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the (outputs, inputs) of each linear of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes |= {f"{at}.{name}.weight": dims for name, dims in self.linears().items()}
            shapes |= {
                f"{at}.{name}.weight": (self.hidden,) for name in ("input_layernorm", "post_attention_layernorm")
            }
            shapes |= {f"{at}.self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


SHAPES: dict[str, Shape] = {
    "0.13m": Shape(64, 2, 4, 2, 32, 128, 512),
    "4m": Shape(256, 5, 4, 2, 64, 768, 512),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288, 151_936, tied=False, dtype="bfloat16"),
}
"""The shapes by name."""


def write_model(
    folder: Path,
    shape: Shape | HybridShape,
    *,
    positions: int = POSITIONS,
    weights: bool = True,
    bits: int | None = None,
    seed: int = 0,
) -> Path:
    """Write a model folder with config, tokenizer and chat template, and float32 weights unless `weights` is False.

    `bits` says that weights which are drawn when the model is loaded are quantised, in groups of 64.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(folder, shape.vocab, positions)
    config = shape.config(positions, [ids["<|im_end|>"], ids["<|endoftext|>"]])
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
    _write_json(folder / "config.json", config)
    if weights:
        if isinstance(shape, HybridShape):
            raise ValueError("the weights of this shape are drawn when they are loaded; use random weights")
        if shape.parameters > _MAX_WRITTEN:
            raise ValueError(f"{shape.parameters:,} parameters are too many to write; use random weights instead")
        _write_weights(folder / "model.safetensors", shape, seed)
    return folder


def write_adapter(
    folder: Path, shape: Shape | HybridShape, *, rank: int = 16, scale: float = 2.0, seed: int = 0
) -> Path:
    """Write an adapter folder in mlx-lm's format with a delta on every linear, strong enough to change answers."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}
    for at, (out, into) in shape.adapted().items():
        tensors[f"{at}.lora_a"] = rng.normal(0, into**-0.5, (into, rank)).astype(np.float32)
        tensors[f"{at}.lora_b"] = rng.normal(0, 0.2 * rank**-0.5, (rank, out)).astype(np.float32)
    save_file(tensors, folder / "adapters.safetensors")
    _write_json(
        folder / "adapter_config.json",
        {
            "fine_tune_type": "lora",
            "num_layers": shape.layers,
            "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(shape.linears())},
        },
    )
    return folder


def _write_weights(file: Path, shape: Shape, seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, dims in shape.tensors().items():
        if len(dims) == 1:
            tensors[name] = np.ones(dims, np.float32)
            continue
        out_head = name == "lm_head.weight" or (shape.tied and "embed_tokens" in name)
        tensors[name] = rng.normal(0, (_SPREAD if out_head else 1.5) * dims[-1] ** -0.5, dims).astype(np.float32)
        if out_head:
            tensors[name][-len(SPECIAL) :] = 0.0
    save_file(tensors, file, metadata={"format": "mlx"})


def _write_tokenizer(folder: Path, vocab: int, positions: int) -> dict[str, int]:
    """Write a byte-level BPE over ASCII with exactly `vocab` tokens: characters, then syllables, then pairs of them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = {chr(c): c - 33 for c in range(33, 127)} | {"Ġ": 94, "Ċ": 95}
    merges: list[tuple[str, str]] = []
    syllables = list(product("bdfgklmnprstvzhjwxcq", "aeiou"))
    plain = ["".join(s) for s in syllables]
    spaced = [("Ġ", s) for s in plain]
    pairs = product(plain, plain)
    triples = ((a + b, c) for a, b in product(plain, plain) for c in plain)
    for left, right in chain(syllables, spaced, pairs, triples):
        if len(tokens) == vocab - len(SPECIAL):
            break
        tokens[left + right] = len(tokens)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"no tokenizer of {vocab} tokens can be made")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": positions,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
    )
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return {s: vocab - len(SPECIAL) + i for i, s in enumerate(SPECIAL)}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

"""The dimensions of hybrids, which `tandem bench engine` measures with weights drawn when they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HybridShape:
    """The dimensions of a Qwen3.5 text model: of every four layers, three keep a state and the last has attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    key_heads: int  # of the layers that keep a state
    value_heads: int
    state_dim: int  # of each of these heads, for keys and for values
    dtype: str = "bfloat16"

    def _by_state(self) -> dict[str, tuple[int, int]]:
        keys, values = self.key_heads * self.state_dim, self.value_heads * self.state_dim
        return {
            "linear_attn.in_proj_qkv": (2 * keys + values, self.hidden),
            "linear_attn.in_proj_z": (values, self.hidden),
            "linear_attn.in_proj_b": (self.value_heads, self.hidden),
            "linear_attn.in_proj_a": (self.value_heads, self.hidden),
            "linear_attn.out_proj": (self.hidden, values),
        }

    def _by_attention(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (2 * q, self.hidden),  # queries and their gates
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
        }

    def _by_mlp(self) -> dict[str, tuple[int, int]]:
        return {
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the (outputs, inputs) of each linear of both kinds of layers."""
        return self._by_state() | self._by_attention() | self._by_mlp()

    def adapted(self) -> dict[str, tuple[int, int]]:
        """Return the (outputs, inputs) of every linear of the layers by its name."""
        found: dict[str, tuple[int, int]] = {}
        for layer in range(self.layers):
            mixer = self._by_attention() if layer % 4 == 3 else self._by_state()
            for name, dims in (mixer | self._by_mlp()).items():
                found[f"language_model.model.layers.{layer}.{name}"] = dims
        return found

    def config(self, positions: int, stop: list[int]) -> dict[str, Any]:
        """Return the content of `config.json`; `stop` are the tokens that end a sequence."""
        rope = {"type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
        return {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForCausalLM"],
            "eos_token_id": stop,
            "torch_dtype": self.dtype,
            "text_config": {
                "model_type": "qwen3_5_text",
                "hidden_size": self.hidden,
                "num_hidden_layers": self.layers,
                "intermediate_size": self.intermediate,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "rms_norm_eps": 1e-6,
                "vocab_size": self.vocab,
                "max_position_embeddings": positions,
                "tie_word_embeddings": False,
                "full_attention_interval": 4,
                "linear_num_key_heads": self.key_heads,
                "linear_num_value_heads": self.value_heads,
                "linear_key_head_dim": self.state_dim,
                "linear_value_head_dim": self.state_dim,
                "linear_conv_kernel_dim": 4,
                "rope_parameters": rope,
            },
        }


HYBRIDS = {
    "qwen3.5-9b": HybridShape(4096, 32, 16, 4, 256, 12288, 248_320, 16, 32, 128),
}
"""The shapes by name."""

"""The built-in demo model: the paths of its files, and nothing else (see ``MODEL_CARD.md``)."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

MODEL_PATH: Path = _HERE / "base"
"""A Qwen3-architecture model folder that mlx-lm and transformers load unmodified."""

DRAFT_PATH: Path = _HERE / "draft"
"""A smaller model with the same tokenizer, for speculative decoding."""

ADAPTER_PATHS: dict[str, Path] = {name: _HERE / "adapters" / name for name in ("shout", "json", "down")}
"""LoRA adapters of the model: ``shout`` in mlx-lm's folder format, ``json`` and ``down`` in PEFT's."""

EXAMPLES: dict[str, Path] = {"captain": _HERE / "examples" / "captain.jsonl"}
"""Files of examples from which ``tandem train sft NAME`` teaches the model: ``captain`` adds for a captain."""

__all__ = ["ADAPTER_PATHS", "DRAFT_PATH", "EXAMPLES", "MODEL_PATH"]

"""Small tokenizers, made on the spot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.templates.client import ChatTemplate
from mlx_tandem.generation.templates.messages import Failed, Rendered, Setup, decode_values
from mlx_tandem.generation.templates.rendering import Renderer
from mlx_tandem.generation.tokenizer import Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>")
CORPUS = (
    "the quick brown fox jumps over the lazy dog, hello world",
    "naïve café über straße 你好 世界 👩‍👩‍👧 🙂",
    "0123456789 <|im_",
)


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    _add(backend)
    return Tokenizer(backend, {"eos_token": {"content": "<|im_end|>"}, "bos_token": None})


@cache
def sentencepiece(normalized: bool = False) -> Tokenizer:
    """Metaspace with byte fallback, as in Llama 2 and Gemma."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz<|_>", "▁the", "▁hello"):
        vocab.setdefault(piece, len(vocab))
    merges = [("▁t", "he"), ("h", "e"), ("▁", "t")]
    for a, b in merges:
        vocab.setdefault(a, len(vocab))
        vocab.setdefault(b, len(vocab))
        vocab.setdefault(a + b, len(vocab))
    backend = Backend(models.BPE(vocab, merges[1:] + merges[:1], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add(backend, normalized)
    return Tokenizer(backend)


def _add(backend: Backend, normalized: bool = False) -> None:
    backend.add_special_tokens([AddedToken(t, special=True, normalized=normalized) for t in SPECIALS])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])


def model_folder(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    """Put the tokenizer and the chat template of a model into `folder`, and nothing else; return it."""
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def render_with(
    source: str, tokenizer: Tokenizer
) -> Callable[[Sequence[Mapping[str, Any]], Mapping[str, bool]], list[Part]]:
    """Return what renders conversations by a template, in this process."""
    renderer = Renderer(Setup(source, tokenizer.special_texts(), tuple(tokenizer.special_tokens)))

    def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, bool]) -> list[Part]:
        answer = renderer.render({"messages": messages, "add_generation_prompt": True, **options})
        assert isinstance(answer, Rendered)
        return answer.parts

    return render


class Here:
    """The program of a chat template's worker, without its process."""

    def __init__(self, source: str, tokenizer: Tokenizer):
        self._renderer = Renderer(Setup(source, tokenizer.special_texts(), tuple(tokenizer.special_tokens)))

    async def ask(self, item: bytes) -> Rendered | Failed:
        return self._renderer.render(decode_values(item))


def template_here(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return a chat template that has been checked and is rendered in this process."""
    made = ChatTemplate(source, tokenizer)
    made._pool = Here(source, tokenizer)  # type: ignore[assignment]
    asyncio.run(made.check())
    return made

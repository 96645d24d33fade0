"""Chat template, tokenizer, and packed training rows. This module does not import MLX: it runs in data worker
processes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import data, styles
from .exchanges import Message

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
END_TEXT, IM_START, IM_END = 0, 1, 2
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
NO_THINKING = "<think>\n\n</think>\n\n"
PROMPT_WEIGHT, ANSWER_WEIGHT = 1, 10
"""Loss weights, as small integers so that rows travel between processes in bytes."""

_SPLIT = r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Digits alone, words with the character before them, punctuation, and runs of newlines as one piece, so
that a prompt and the text that continues it split alike at their border."""


@cache
def template() -> jinja2.Template:
    """Return the chat template, compiled the way transformers compiles it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE_FILE.read_text())


def render(messages: list[Message], **variables: Any) -> str:
    """Return the prompt text of ``messages``; variables are ``tools``, ``add_generation_prompt``,
    ``enable_thinking``.
    """
    return template().render(messages=messages, **variables)


def prompt_text(chat: data.Conversation) -> str:
    """Return everything before the last answer, exactly as a server would render it."""
    more: dict[str, Any] = {} if chat.thinking else {"enable_thinking": False}
    return render(chat.messages, tools=chat.tools or None, add_generation_prompt=True, **more)


def full_text(chat: data.Conversation) -> str:
    """Return the whole chat with its last answer."""
    return prompt_text(chat) + styles.completion(chat.answer) + "<|im_end|>\n"


def train_tokenizer(seed: int, chats: int, vocabulary: int = 1024) -> Tokenizer:
    """Return a byte-level BPE over rendered chats; the markers are added tokens and take no part in the merges."""
    rng = random.Random(seed)

    def texts() -> Iterable[str]:
        for _ in range(chats):
            text = full_text(data.conversation(rng))
            for marker in SPECIAL + ADDED:
                text = text.replace(marker, "\x00")
            yield from (piece for piece in text.split("\x00") if piece)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(ADDED),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in ADDED])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def weigh(tokenizer: Tokenizer, ids: list[int], taught: list[bool]) -> list[int]:
    """Return the loss weight of each token: high for taught answers with their ``<|im_end|>``, none for others, else
    low.

    The empty think block that the template writes before an answer without thinking weighs nothing: a model that is
    taught to write it opens one now and then where nobody has asked for it.
    """
    opening = encode(tokenizer, "<|im_start|>assistant\n")
    empty = encode(tokenizer, NO_THINKING)
    weights = [PROMPT_WEIGHT] * len(ids)
    turn, place = 0, 0
    while True:
        try:
            place = ids.index(IM_START, place)
        except ValueError:
            return weights
        if ids[place : place + len(opening)] != opening:
            place += 1
            continue
        start = place + len(opening)
        if ids[start : start + len(empty)] == empty:
            weights[start : start + len(empty)] = [0] * len(empty)
            start += len(empty)
        stop = ids.index(IM_END, start) + 1
        weights[start:stop] = [ANSWER_WEIGHT if taught[turn] else 0] * (stop - start)
        turn, place = turn + 1, stop


@dataclass(frozen=True)
class BatchSpec:
    """The name of one batch: the same spec gives the same arrays."""

    seed: int
    rows: int
    length: int
    style: str = "base"
    mix: tuple[tuple[str, float], ...] = tuple(data.MIX.items())


def pack(tokenizer: Tokenizer, spec: BatchSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of ``length + 1`` token ids and their weights, filled with whole chats; the last chat of a row is
    cut.
    """
    rng = random.Random(f"{spec.seed} {spec.length} {spec.style}")
    mix = dict(spec.mix)
    width = spec.length + 1
    ids = np.zeros((spec.rows, width), np.uint16)
    weights = np.zeros((spec.rows, width), np.uint8)
    for row in range(spec.rows):
        filled: list[int] = []
        weighed: list[int] = []
        while len(filled) < width:
            characters = rng.randint(500, 3 * spec.length) if spec.length > 1024 and rng.random() < 0.8 else 0
            chat = data.conversation(rng, style=spec.style, mix=mix, characters=characters)
            part = encode(tokenizer, full_text(chat))
            filled += [*part, END_TEXT]
            weighed += [*weigh(tokenizer, part, chat.taught), PROMPT_WEIGHT]
        ids[row], weights[row] = filled[:width], weighed[:width]
    return ids, weights


_worker: dict[str, Tokenizer] = {}


def start_worker(tokenizer_file: str) -> None:
    """Load the tokenizer in a pool process."""
    _worker["tokenizer"] = Tokenizer.from_file(tokenizer_file)


def work(spec: BatchSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return one batch, in a pool process."""
    return pack(_worker["tokenizer"], spec)

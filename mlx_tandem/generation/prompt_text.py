"""The texts of prompts for people, made of their tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from mlx_tandem.generation.tokenizer import Tokenizer


def said(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the text of a prompt for people: that of its messages, without the roles that the chat template writes.

    A role is the text that the template writes between two special tokens, alone or on the first line.
    """
    parts = []
    for is_special, ids in groupby(prompt, tokenizer.special_ids.__contains__):
        text = "" if is_special else _ROLE.sub("", tokenizer.decode(list(ids)).strip())
        if text := _NO_THOUGHT.sub("", text).strip():
            parts.append(text)
    return "\n".join(parts)


_ROLE = re.compile(r"\A(system|developer|user|human|assistant|model|tool|ipython)(\n|$)")
_NO_THOUGHT = re.compile(r"<think>\s*</think>")

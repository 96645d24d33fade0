"""Turning what people write in feedback into token ids of the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.messages import chat_messages
from mlx_tandem.limits import check_token_ids
from mlx_tandem.training.feedback.completions import Remembered, unpacked

Tokens = tuple[int, ...]


async def prompt_of(front: Front, messages: Sequence[Mapping[str, Any]], param: str) -> Tokens:
    """Return a conversation as a prompt for the next answer. Raises InvalidRequest naming `param`."""
    try:
        return tuple(await front.prompts.chat(chat_messages(list(messages))))
    except InvalidRequest as e:
        raise InvalidRequest(f"{param}: {e.message}", param=param, code=e.code) from e


async def answer_of(front: Front, text: str, param: str) -> Tokens:
    """Return an answer with the token that ends it. Raises InvalidRequest naming `param`."""
    tokens = tuple(await front.prompts.text(text, param, begins=False))
    ends = front.client.check_ready().eos_token_ids
    tokenizer = front.tokenizer
    named = tokenizer.special_tokens.get(tokenizer.special_texts().get("eos_token", ""))
    end = next(iter(ends), None) if named is None else named
    return tokens if end is None else (*tokens, end)


async def correction_of(front: Front, answer: Tokens, text: str, param: str) -> Tokens:
    """Return the tokens of a corrected answer: it begins with the thoughts of the one that it corrects, and ends alike.

    Raises InvalidRequest naming `param`.
    """
    ends = front.client.check_ready().eos_token_ids
    thoughts, space = _thoughts(front, answer)
    corrected = await answer_of(front, space + text, param)
    if answer and answer[-1] in ends and corrected[-1] in ends:
        corrected = (*corrected[:-1], answer[-1])
    return (*thoughts, *corrected)


def _thoughts(front: Front, answer: Tokens) -> tuple[Tokens, str]:
    """Return the tokens of an answer's thoughts up to their end, and the space after them; () and "" for none."""
    form, decode = front.reading.form, front.tokenizer.decode
    if form is None or form.close not in decode(answer, show_special=True):
        return (), ""
    low, high = 1, len(answer)
    while low < high:  # The fewest tokens with which the thoughts have ended.
        middle = (low + high) // 2
        if form.close in decode(answer[:middle], show_special=True):
            high = middle
        else:
            low = middle + 1
    after = decode(answer[low:])
    return answer[:low], after[: len(after) - len(after.lstrip())]


def check_room(front: Front, prompt: Tokens, answers: Sequence[Tokens], param: str) -> None:
    """Raise InvalidRequest naming `param` if the prompt with one of the answers is longer than the context."""
    info = front.client.check_ready()
    room = front.room(info)
    for answer in answers:
        if len(prompt) + len(answer) > room:
            raise InvalidRequest(
                f"{param} has {len(prompt) + len(answer)} tokens with its prompt; at most {room} fit", param=param
            )
        check_token_ids(answer, info.vocab_size, param)


def remembered(found: Remembered, choice: int) -> tuple[Tokens, Tokens]:
    """Return the prompt and the answer of a choice of a completion."""
    return unpacked(found.prompt_of(choice)), unpacked(found.choices[choice])


def siblings(found: Remembered, choice: int) -> tuple[tuple[Tokens, ...], int]:
    """Return all answers to the prompt of a choice, and the place of the choice among them."""
    n = len(found.choices) // len(found.prompts)
    first = choice // n * n
    return tuple(map(unpacked, found.choices[first : first + n])), choice - first

"""The client of the process that tokenises long texts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from mlx_tandem.errors import InvalidRequest, TooLarge
from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.tokenizing.listing import Listing
from mlx_tandem.generation.tokenizing.messages import (
    Answer,
    Decode,
    Encode,
    Failed,
    FindSpecial,
    Found,
    Ids,
    List,
    Question,
    Text,
    decode_answer,
)
from mlx_tandem.isolation.frames import encode
from mlx_tandem.isolation.pool import Bounds, WorkerPool
from mlx_tandem.isolation.process import Lost, Program
from mlx_tandem.limits import MAX_TEXT_BYTES, MAX_TEXT_MEMORY, MAX_TEXT_REPLY, MAX_WAITING_TEXT

T = TypeVar("T")

BOUNDS = Bounds(items=1024, bytes=MAX_WAITING_TEXT, seconds=30.0)
"""Limits of the queue in front of the process."""

ROOM = 1 << 20
"""Bytes that a question or an answer may have besides its text or its lists."""


class LongTexts:
    """A tokenizer of long texts in one separate process, which handles one text at a time.

    It belongs to one event loop and starts its process for the first text. `param` is the field that errors name. All
    methods raise TooLarge for questions over `MAX_TEXT_BYTES`, InvalidRequest for texts that cannot be tokenised within
    the limits, and Overloaded when too many texts wait already.
    """

    def __init__(self, folder: Path):
        """Prepare the process without starting it. `folder` has the tokenizer."""
        program = Program(
            "mlx_tandem.generation.tokenizing.worker",
            (str(folder.absolute()), str(MAX_TEXT_MEMORY)),
            decode_answer,
            max(MAX_TEXT_REPLY, 4 * MAX_TEXT_BYTES) + ROOM,
            environment={"TOKENIZERS_PARALLELISM": "false"},
        )
        self._pool = WorkerPool("long texts", program, 1, BOUNDS)

    async def ids(self, parts: Sequence[Part], param: str, *, begins: bool = False) -> array[int]:
        """Return the token ids of a text in parts. With `begins` the text is a whole prompt in one part."""
        answer = await self._ask(Encode(list(parts), begins), Ids, param)
        return array("I", answer.ids)

    async def listing(self, parts: Sequence[Part], param: str, *, begins: bool, pieces: bool) -> Listing:
        """Return the token ids as JSON, with the tokens' pieces of the vocabulary if `pieces` is set."""
        return await self._ask(List(Encode(list(parts), begins), pieces), Listing, param)

    async def text(self, ids: Sequence[int], vocab_size: int, param: str) -> bytes:
        """Return the text of token ids as a JSON string. Raises InvalidRequest naming the first invalid id."""
        return (await self._ask(Decode(ids, vocab_size, param), Text, param)).json

    async def find_special(self, texts: Sequence[str], param: str) -> int | None:
        """Return the index of the first text that encodes to a special token; None if no text does."""
        return (await self._ask(FindSpecial(list(texts)), Found, param)).index

    async def close(self) -> None:
        """End the process."""
        await self._pool.close()

    async def _ask(self, question: Question, kind: type[T], param: str) -> T:
        """Return the answer of type `kind`. Raises InvalidRequest for every other answer."""
        try:
            item = encode(question)
        except UnicodeEncodeError as e:
            raise InvalidRequest(f"{param} holds half a surrogate pair", param=param) from e
        except OverflowError as e:
            raise InvalidRequest(f"{param} holds a number that is no token id", param=param) from e
        if len(item) > MAX_TEXT_BYTES + ROOM:
            raise TooLarge(f"{param} is over the limit of {MAX_TEXT_BYTES} bytes", param=param)
        answer = await self._pool.ask(item)
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Failed) and answer.kind == "refused":
            raise InvalidRequest(answer.detail, param=answer.param or param)
        raise InvalidRequest(f"{param} {_why(answer)}", param=param)


def _why(answer: Answer | Lost) -> str:
    """Return the end of an error message, which explains why the field could not be tokenised."""
    if isinstance(answer, Lost) and answer.kind == "timeout":
        return "takes too long to tokenise"
    if isinstance(answer, Lost):
        return f"cannot be tokenised within {MAX_TEXT_MEMORY >> 20} MB of memory"
    if isinstance(answer, Failed) and answer.kind == "too_large":
        return f"makes a reply of more than {MAX_TEXT_REPLY} bytes"
    return "cannot be tokenised"

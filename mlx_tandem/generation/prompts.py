"""Turning texts and conversations into token ids. Long texts are tokenised in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.templates.client import ChatTemplate
from mlx_tandem.generation.templates.shields import Shields, texts
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.generation.tokenizing.client import LongTexts
from mlx_tandem.generation.tokenizing.listing import Listing, listing
from mlx_tandem.generation.tool_history import Message
from mlx_tandem.limits import check_token_ids
from mlx_tandem.strict_json import dumps

LONG_TEXT = 8192
"""Fewest characters, or token ids, of a text that another process handles, so that streams do not wait for it."""


class Prompts:
    """A model's tokenizer and chat template. It belongs to one event loop, and refuses requests with InvalidRequest."""

    def __init__(self, folder: Path, *, template: str = "", template_seconds: float = 1.0):
        """Load the tokenizer and the chat template. Raises ModelError.

        `template` is a file's path or the text of a template; if it is empty, the model's own template is used, or the
        plain one for a model without a template. The template may take `template_seconds` of CPU time for one
        conversation.
        """
        self.tokenizer = Tokenizer.load(folder)
        seconds = template_seconds
        self.template = (
            ChatTemplate.given(template, self.tokenizer, seconds=seconds)
            if template
            else ChatTemplate.load(folder, self.tokenizer, seconds=seconds)
        )
        self._long = LongTexts(folder)

    async def check(self) -> None:
        """Raise ModelError when the chat template cannot be used."""
        await self.template.check()

    async def close(self) -> None:
        """End the processes."""
        await self.template.close()
        await self._long.close()

    async def text(self, text: str, param: str, *, begins: bool = True, total: int | None = None) -> Sequence[int]:
        """Return the token ids of a raw prompt, in which the text of a special token means that token.

        `param` is the field that errors name. `total` is the number of characters of all prompts of the request. With
        `begins`, the tokenizer adds the special tokens that begin a text.
        """
        return await self._ids([(text, False)], param, begins=begins, total=total)

    async def chat(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> Sequence[int]:
        """Return the token ids of a conversation with the beginning of the answer, unless `options` say otherwise."""
        return await self.tokens(await self.rendered(messages, options), "messages")

    async def rendered(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> list[Part]:
        """Return the text of a conversation. Only the template's own parts may encode to special tokens."""
        if self.tokenizer.has_normalized_specials:
            await self._refuse_hidden_specials(messages, options or {})
        return await self.template.render(messages, options)

    async def tokens(self, parts: Sequence[Part], param: str) -> Sequence[int]:
        """Return the token ids of a text in parts."""
        return await self._ids(parts, param)

    async def listing(self, parts: Sequence[Part], param: str, *, begins: bool, pieces: bool) -> Listing:
        """Return the token ids of a text as JSON, with their pieces of the vocabulary if `pieces` is set."""
        if self._is_long(parts):
            return await self._long.listing(parts, param, begins=begins, pieces=pieces)
        return listing(self.tokenizer, self._encode(parts, begins), pieces=pieces)

    async def text_of(self, ids: Sequence[int], vocab_size: int, param: str) -> bytes:
        """Return the text of token ids, including special tokens, as a JSON string.

        Raises InvalidRequest naming the first id that is not in [0, `vocab_size`).
        """
        if len(ids) >= LONG_TEXT:
            return await self._long.text(ids, vocab_size, param)
        return dumps(self.tokenizer.decode(check_token_ids(ids, vocab_size, param), show_special=True))

    async def _ids(
        self, parts: Sequence[Part], param: str, *, begins: bool = False, total: int | None = None
    ) -> Sequence[int]:
        if self._is_long(parts, total):
            return await self._long.ids(parts, param, begins=begins)
        return self._encode(parts, begins)

    def _encode(self, parts: Sequence[Part], begins: bool) -> list[int]:
        if begins:
            ((text, _),) = parts
            return self.tokenizer.encode(text, add_special_tokens=True)
        return self.tokenizer.encode_parts(parts)

    @staticmethod
    def _is_long(parts: Sequence[Part], total: int | None = None) -> bool:
        """Return whether another process has to tokenise these parts.

        It also gets all plain parts: these need a second tokenizer, which would take memory in the front.
        """
        size = sum(len(text) for text, _ in parts) if total is None else total
        return size >= LONG_TEXT or any(plain for _, plain in parts)

    async def _refuse_hidden_specials(self, messages: Sequence[Message], options: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for a message or an option that spells a special token only after normalisation."""
        shielded = Shields(tuple(self.tokenizer.special_tokens), {**options, "messages": messages}).values
        fields, values = [], []
        for name, value in shielded.items():
            inner = [(f"{name}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else []
            for where, item in inner or [(name, value)]:
                pairs = item.items() if isinstance(item, Mapping) else [("", item)]
                for key, content in pairs:
                    for text in texts({key: content}):
                        fields.append(f"{where}.{ascii(key[:64])[1:-1]}".removesuffix("."))
                        values.append(text)
        if sum(map(len, values)) < LONG_TEXT:
            found = next((i for i, text in enumerate(values) if self.tokenizer.spells_special(text)), None)
        else:
            found = await self._long.find_special(values, "messages")
        if found is not None:
            field = fields[found]
            raise InvalidRequest(f"{field} spells a control token of the model", param=field)

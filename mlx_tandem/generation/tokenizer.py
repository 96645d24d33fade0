"""The tokenizer of a model folder, which is read from `tokenizer.json`.

It uses only the `tokenizers` library, so the front never imports a model framework.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from mlx_tandem.adapters import refuse_adapter
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.parts import Part
from mlx_tandem.small_files import read_object

TEXT_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of `tokenizer_config.json` that a chat template may print."""


SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Kinds of decoder that write a space as \u2581 and a byte as <0xNN>."""


_TRIAL = "Hello, wörld!\n 1 + 2 = 3 🙂"
"""A text that every working tokenizer can encode."""


@contextmanager
def _contained(error: Callable[[str], InvalidRequest]) -> Iterator[None]:
    """Convert each failure of the library to the result of `error`, which gets the first line of the failure's message.

    The library raises a bare Exception for a malformed file. Some malformed files make it panic later, and a panic is
    not derived from Exception.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise error(next(iter(str(e).splitlines()), type(e).__name__)) from e


def _cannot_encode(why: str) -> InvalidRequest:
    return InvalidRequest(f"the model's tokenizer cannot encode this text: {why}")


class Decoder:
    """An incremental decoder that returns text as soon as it can no longer change.

    Each token stands for bytes, and the text is their UTF-8 decoding, with a replacement character for invalid bytes.
    The time is linear in the number of tokens, at most an unfinished character is held back, and the space before a
    first word is kept. (The library's own incremental decoder holds back runs of invalid bytes forever, and raises for
    some of them.)
    """

    __slots__ = ("_decode", "_table")

    def __init__(self, table: dict[int, bytes]):
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        """Return the text that `token` completes, which may be empty."""
        return self._decode(self._table[token])

    def flush(self) -> str:
        """Return the rest of the text after the last token."""
        return self._decode(b"", True)


class Tokenizer:
    """A tokenizer, immutable after loading and usable from any thread."""

    def __init__(self, backend: Backend, config: dict[str, Any] | None = None):
        self._backend = backend
        self._config = config or {}
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {t.content: i for i, t in added.items()}
        self.special_tokens: dict[str, int] = {t.content: i for i, t in added.items() if t.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        # If special tokens are matched after normalisation, a search for their text misses some of their spellings.
        self.has_normalized_specials = backend.normalizer is not None and any(
            t.special and t.normalized for t in added.values()
        )
        kinds = _decoder_kinds(json.loads(backend.to_str())["decoder"])
        if not kinds or ("ByteLevel" not in kinds and not kinds <= SENTENCEPIECE):
            raise ModelError(
                f"tokenizer.json: a decoder of kind {', '.join(sorted(kinds)) or 'none'} is not supported",
                param="decoder",
            )
        self._bytes = _TokenBytes(backend, kinds, {i: t.content for i, t in added.items()})
        self._text_bytes = _VisibleBytes(self._bytes, self.special_ids)
        self._parsed_bytes: dict[frozenset[int], _VisibleBytes] = {}  # by the special tokens that are shown

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Return whether both have the same tokens, under the same ids."""
        return self._backend.get_vocab(with_added_tokens=True) == other._backend.get_vocab(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer in `folder`. Raises ModelError naming the file that is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            refuse_adapter(folder)
            raise ModelError(f"{path} is missing: a model folder needs its tokenizer in this format", param=path.name)
        with _contained(lambda why: ModelError(f"{path} is not a tokenizer: {why}", param=path.name)):
            backend = Backend.from_file(str(path))
            backend.no_truncation()
            backend.no_padding()
            made = cls(backend, read_object(folder / "tokenizer_config.json"))
            made.decode(made.encode(_TRIAL, add_special_tokens=True))
            return made

    @property
    def config(self) -> dict[str, Any]:
        """The contents of `tokenizer_config.json`; {} without that file."""
        return self._config

    def special_texts(self) -> dict[str, str]:
        """Return the texts of `bos_token`, `eos_token` and so on for chat templates, as far as the folder has them."""
        texts: dict[str, str] = {}
        for key in TEXT_SPECIALS:
            value = self._config.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                texts[key] = value
        return texts

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`. The text of a special token becomes its id.

        The call releases the interpreter lock. Raises InvalidRequest for a text that cannot be encoded.
        """
        with _contained(_cannot_encode):
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def is_token(self, text: str) -> bool:
        """Return whether `text` is encoded to one token."""
        return len(self.encode(text)) == 1

    def encode_parts(self, parts: Iterable[Part]) -> list[int]:
        """Return the token ids of a text in parts. The ids of plain parts contain no special token."""
        ids: list[int] = []
        for text, plain in parts:
            ids += self.encode_plain(text) if plain else self.encode(text)
        return ids

    def spells_special(self, text: str) -> bool:
        """Return whether `text` encodes to ids that include a special token."""
        return not self.special_ids.isdisjoint(self.encode(text))

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text` without any special token, whatever `text` spells. Raises InvalidRequest."""
        with _contained(_cannot_encode):
            ids = list(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        if self.special_ids.isdisjoint(ids):
            return ids
        # In some vocabularies ordinary merges also lead to a special token. A smaller piece cannot spell it.
        if len(text) == 1:
            raise InvalidRequest("a message contains a character that only a control token can stand for")
        half = len(text) // 2
        return self.encode_plain(text[:half]) + self.encode_plain(text[half:])

    @cached_property
    def _plain(self) -> Backend:
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def decoder(self, *, show_special: bool = False, shown: frozenset[int] = frozenset()) -> Decoder:
        """Return a fresh decoder for one choice. Without `show_special`, it shows only the special tokens `shown`."""
        if show_special:
            return Decoder(self._bytes)
        if not shown:
            return Decoder(self._text_bytes)
        if shown not in self._parsed_bytes:
            self._parsed_bytes[shown] = _VisibleBytes(self._bytes, self.special_ids - shown)
        return Decoder(self._parsed_bytes[shown])

    def specials_in(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of the special tokens whose text occurs in one of `texts`."""
        texts = tuple(texts)
        return frozenset(i for name, i in self.special_tokens.items() if name and any(name in text for text in texts))

    def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
        """Return the text of `ids`, with special tokens only if `show_special` is set."""
        table = self._bytes if show_special else self._text_bytes
        return b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token stands for. A special token stands for its text."""
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """Return the text of one token alone. An incomplete character becomes a replacement character."""
        return self._bytes[token].decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """Return the token as the vocabulary writes it; an empty string for an id without an entry."""
        return self._backend.id_to_token(token) or ""


class _TokenBytes(dict[int, bytes]):
    """A table of each token's bytes. An entry is computed on first use, because most of a vocabulary never occurs."""

    def __init__(self, backend: Backend, kinds: set[str], added: dict[int, str]):
        super().__init__()
        self._backend = backend
        self._byte_level = "ByteLevel" in kinds
        self._byte_tokens = "ByteFallback" in kinds
        self._added = added

    def __missing__(self, token: int) -> bytes:
        value = self[token] = self._work_out(token)
        return value

    def _work_out(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece: str | None = self._backend.id_to_token(token)
        if piece is None:  # Padding rows of the embedding have no token.
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[c] for c in piece])
            except KeyError:
                return piece.encode()
        if self._byte_tokens and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


class _VisibleBytes(dict[int, bytes]):
    """A table of the bytes that each token shows. Special tokens show none."""

    def __init__(self, table: _TokenBytes, hidden: Iterable[int]):
        super().__init__(dict.fromkeys(hidden, b""))
        self._table = table

    def __missing__(self, token: int) -> bytes:
        value = self[token] = self._table[token]
        return value


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Return the type names of a decoder from `tokenizer.json`; for a sequence, those of its members."""
    if decoder is None:
        return set()
    return (
        set().union(*map(_decoder_kinds, decoder["decoders"])) if decoder["type"] == "Sequence" else {decoder["type"]}
    )


def _byte_of_char() -> dict[str, int]:
    """Return a byte for each printable character that byte-level vocabularies write for it (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()

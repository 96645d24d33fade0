"""Grammars with a limit on the digits of JSON, without which a model that has gone astray may write digits only.

llguidance has no limit on digits, so the masks have one: where a text already ends with many digits, the tokens that
begin with another one are left out, unless they are all that may follow. A mask does not tell a number from a string
whose pattern allows digits and no letters, so both are limited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLTokenizer

from mlx_tandem.engine.grammars.masks import Grammars
from mlx_tandem.engine.masks import Place
from mlx_tandem.engine.plan import Mask
from mlx_tandem.types import Request

MOST_DIGITS = 80
"""Maximum number of consecutive digits. The last token may exceed it, because a token can hold several digits.

Integers of 256 bits have up to 78 digits, and a float64 needs 17 before its exponent.
"""

_DIGITS = b"0123456789"
_LETTERS = b"zqxykwvjb"  # that occur in no number
_JSON = b"%json"  # in the text of every grammar that has JSON in it


class Digits:
    """The digits in a vocabulary's tokens."""

    def __init__(self, tokenizer: LLTokenizer):
        """Look at every token, which takes a microsecond for each."""
        texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        self._ends: dict[int, tuple[int, bool]] = {}  # how many digits a token ends with, and whether it has no others
        for token, text in enumerate(texts):
            if digits := len(text) - len(text.rstrip(_DIGITS)):
                self._ends[token] = digits, digits == len(text)
        begins = [text[:1] in _DIGITS and text != b"" for text in texts]
        self._others = ~np.packbits(np.array(begins, bool), bitorder="little")  # the tokens that begin with no digit
        self._letter = next((texts.index(bytes([c])) for c in _LETTERS if bytes([c]) in texts), None)

    def is_at_limit(self, tokens: Sequence[int], begin: int) -> bool:
        """Return whether the output `tokens[begin:]` ends with as many digits as may follow each other."""
        digits = 0
        for at in range(len(tokens) - 1, begin - 1, -1):
            more, is_whole = self._ends.get(tokens[at], (0, False))
            digits += more
            if digits >= MOST_DIGITS or not is_whole:
                break
        return digits >= MOST_DIGITS

    def without_digits(self, mask: Mask) -> Mask:
        """Remove the tokens that begin with a digit from a mask inside a number.

        A mask that allows a letter is not inside a number and is returned unchanged. So is a mask that allows digits
        only.
        """
        found = np.frombuffer(mask, np.uint8)
        if self._letter is None or found[self._letter // 8] >> self._letter % 8 & 1:
            return mask
        size = min(found.size, self._others.size)
        rest = np.zeros_like(found)
        rest[:size] = found[:size] & self._others[:size]
        return rest.tobytes() if rest.any() else mask


class DigitLimitedGrammars(Grammars):
    """The grammars of open requests, with a limit on consecutive digits in JSON."""

    def __init__(self, open_tokenizer: Callable[[], LLTokenizer], vocab_size: int, wake: Callable[[], None]):
        """Make a store without grammars, as `Grammars` does."""
        self._digits: Digits | None = None  # the thread sets it before the first grammar

        def opened() -> LLTokenizer:
            tokenizer = open_tokenizer()
            self._digits = Digits(tokenizer)
            return tokenizer

        super().__init__(opened, vocab_size, wake)

    def masks(self, places: Sequence[Place]) -> list[Mask | None]:
        """Return which tokens may follow at each place, as `Grammars` does."""
        return [self._limited(place, mask) for place, mask in zip(places, super().masks(places), strict=True)]

    def _limited(self, place: Place, mask: Mask | None) -> Mask | None:
        """Return the mask at a place, without digits if the text there ends with too many."""
        digits = self._digits
        assert digits is not None
        if mask and digits.is_at_limit(place.tokens, len(place.request.prompt)) and _has_json(place.request):
            return digits.without_digits(mask)
        return mask


def _has_json(request: Request) -> bool:
    return request.grammar is not None and _JSON in request.grammar.text

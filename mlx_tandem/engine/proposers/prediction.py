"""Drafts from the text that a request predicts: what follows there on the newest tokens follows here.

The answer is expected to begin as the prediction does, and to go on in it token by token. Where it differs, it is found
again by its newest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.engine.proposers.ngram import NgramIndex
from mlx_tandem.types import Request


class Prediction:
    """The prediction of a request, as one of its choices goes through it.

    Args:
        request: The request.
        shortest: The fewest tokens that have to agree.
        longest: The most tokens that are compared.
    """

    def __init__(self, request: Request, shortest: int, longest: int):
        before = request.prompt[-shortest:]  # so that the prediction's beginning is found where the answer begins
        self._text = [*before, *request.prediction]
        self._index = NgramIndex(shortest, longest)
        self._ahead = len(before) - len(request.prompt)  # from the answer's next token to its expected place

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the place in the prediction where the next token of a sequence is expected, and how many tokens agree.

        The latter is 0 where nothing matches.
        """
        self._index.extend(self._text)
        place, length = self._index.find(self._text, tokens, len(tokens) + self._ahead)
        if length:
            self._ahead = place - len(tokens)
        return place, length

    def copy(self, place: int, skip: int, most: int) -> Sequence[int]:
        """Return `most` tokens from `place + skip` on, or fewer at the end of the prediction."""
        return self._text[place + skip : place + skip + most]

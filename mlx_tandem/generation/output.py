"""The text of one choice, decoded from the engine's deltas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlx_tandem.generation.stops import StopScanner
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta, FinishReason, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class TextOptions:
    """Options for turning the tokens of a choice into its text."""

    stops: tuple[str, ...] = ()
    ends: frozenset[str] = frozenset()  # the stops that belong to the chat template and are not reported
    include_stop: bool = False  # the stop string or token that ended the choice is part of its text
    show_special: bool = False
    shown: frozenset[int] = frozenset()  # special tokens that are shown for a parser
    silent: bool = False  # the request only asks about its prompt, and its choices have no text

    def scanner(self) -> StopScanner | None:
        """Return what looks for stop strings in one choice; None if there are none."""
        return StopScanner(self.stops, include=self.include_stop) if self.stops else None

    def choices(
        self, count: int, tokenizer: Tokenizer, params: SamplingParams, eos: Collection[int]
    ) -> list[ChoiceText]:
        """Return `count` new choices. The model ends its texts with one of the token ids `eos`."""
        ends = frozenset((*(() if params.ignore_eos else eos), *params.stop_token_ids))
        kind = SilentChoice if self.silent else ChoiceText
        return [kind(tokenizer, self, ends, params.min_tokens) for _ in range(count)]


class ChoiceText:
    """A choice whose deltas become pieces of text. The choice has ended when `finish` is set.

    When a stop string has ended the choice before the engine did, `stopped` is set as well, and the caller has to
    cancel the choice in the engine. `tokens` are all of the choice so far; `last_tokens` and `last_logprobs` belong to
    the piece that `push` returned last.
    """

    __slots__ = (
        "_decode",
        "_decoder",
        "_ends",
        "_hidden_ends",
        "_hit",
        "_min_tokens",
        "_stops",
        "count",
        "finish",
        "last_logprobs",
        "last_tokens",
        "stopped",
        "tokens",
    )

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, end_ids: Collection[int], min_tokens: int = 0):
        self._decoder = tokenizer.decoder(show_special=options.show_special, shown=options.shown)
        self._decode = self._decoder.push
        self._stops = options.scanner()
        self._ends = options.ends
        self._hit: str | None = None
        self._hidden_ends = () if options.include_stop else end_ids
        self._min_tokens = min_tokens
        self.count = 0
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.stopped = False
        self.last_tokens: tuple[int, ...] = ()
        self.last_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def stop(self) -> str | None:
        """The request's stop string that has ended the choice; None if none did."""
        hit = self._hit if self._stops is None else self._stops.hit
        return None if hit in self._ends else hit

    def stop_here(self, stop: str | None = None) -> None:
        """End the choice, although the engine has not ended it. `stop` is the stop string that ends it, if one does."""
        self._hit = stop
        self.stopped = self.finish is None
        self.finish = "stop"

    def push(self, delta: Delta) -> str:
        """Return the text that `delta` adds. The token that ended the choice counts, but is shown only on request."""
        tokens = self.last_tokens = delta.tokens
        self.last_logprobs = delta.logprobs or ()
        self.count += len(tokens)
        self.tokens += tokens
        if self._stops is None and delta.finish is None and len(tokens) == 1:  # Fast path of almost every token.
            return self._decode(tokens[0])
        shown: Sequence[int] = tokens
        if delta.finish is not None:
            self.finish = delta.finish
            if delta.finish == "stop" and tokens and tokens[-1] in self._hidden_ends:
                shown = tokens[:-1]
        if self._stops is not None:
            return self._push_with_stops(shown)
        text = "".join(map(self._decode, shown))
        return text + self._decoder.flush() if self.finish is not None else text

    def _push_with_stops(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` up to the first stop string that they complete."""
        assert self._stops is not None
        pieces: list[str] = []
        spare = self._min_tokens - self.count + len(self.last_tokens)  # first tokens that may not complete a stop
        for i, token in enumerate(tokens):
            self._stops.armed = i >= spare
            pieces.append(self._stops.push(self._decode(token)))
            if self._stops.hit is not None:
                self._cut(i + 1)
                return "".join(pieces)
        if self.finish is not None:
            pieces.append(self._stops.push(self._decoder.flush()))
            if self._stops.hit is not None:
                self.finish = "stop"
            pieces.append(self._stops.flush())
        return "".join(pieces)

    def _cut(self, kept: int) -> None:
        """End the choice after `kept` tokens of this delta."""
        gone = len(self.last_tokens) - kept
        self.count -= gone
        del self.tokens[len(self.tokens) - gone :]
        self.last_tokens = self.last_tokens[:kept]
        self.last_logprobs = self.last_logprobs[:kept]
        self.stopped = self.finish is None
        self.finish = "stop"


class SilentChoice(ChoiceText):
    """A choice of a request that wants no tokens. It drops the one token that the engine has to draw."""

    __slots__ = ()

    def push(self, delta: Delta) -> str:
        """Return an empty string."""
        if delta.finish is not None:
            self.finish = "length"
        return ""

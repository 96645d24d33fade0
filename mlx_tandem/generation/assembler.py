"""Turning the engine's deltas into events, for streams, whole replies, the Python API and learning alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.generation.events import (
    Event,
    Finish,
    PromptRead,
    ReasoningDelta,
    Said,
    TextDelta,
    ToolCallStart,
    Usage,
)
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta, FinishReason, TokenLogprob

Details = tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[int, ...]]
"""Token ids, logprobs and versions of an event."""

NO_DETAILS: Details = ((), (), ())


class Assembler:
    """A converter of one submission's deltas into events, in the order of the deltas.

    The engine does not know stop strings, so the assembler cancels a choice that one of them ends. It drops deltas of
    choices that have ended.
    """

    def __init__(self, prompted: Prompted, stream: Stream, tokenizer: Tokenizer, eos: Collection[int]):
        """Begin a submission of `prompted`. `eos` are the token ids that end the model's texts."""
        count = prompted.choices
        self._stream = stream
        self._first = stream.first
        self._n = prompted.n
        make = prompted.parser
        # A parser's stop strings are looked for in what is text to it, and not in thoughts and calls.
        options = prompted.text if make is None else replace(prompted.text, stops=())
        self._choices = options.choices(count, tokenizer, prompted.params, eos)
        self._stops = (
            None if make is None or not prompted.text.stops else [prompted.text.scanner() for _ in range(count)]
        )
        self._min_tokens = prompted.params.min_tokens
        self._unread = set(range(len(prompted.prompts)))
        self._version = prompted.version
        self._running_usage = prompted.running_usage
        self._parsers = None if make is None else [make(i) for i in range(count)]
        self._most_calls = prompted.most_calls
        self._held = [NO_DETAILS] * count  # details of tokens whose text a parser holds back, by choice
        self._is_plain = make is None and prompted.version is None and not prompted.running_usage
        self._prompt_tokens = prompted.prompt_tokens
        self._cached = self._reasoning = self._accepted = self._rejected = 0

    def push(self, deltas: Sequence[Delta]) -> list[Event]:
        """Return the events of these deltas. Without a parser, each delta of a live choice gives at least one."""
        events: list[Event] = []
        first, n, choices, is_plain, unread = self._first, self._n, self._choices, self._is_plain, self._unread
        for delta in deltas:
            i = (delta.request - first) * n + delta.choice
            choice = choices[i]
            if unread:
                self._read(i // n, delta, events)
            if choice.finish is not None:
                continue
            if delta.predicted is not None:
                self._accepted += delta.predicted[0]
                self._rejected += delta.predicted[1]
            if self._stops is not None:
                for part in _one_by_one(delta):
                    if choice.finish is None:
                        self._say(i, choice.push(part), delta.version, events)
                continue
            text = choice.push(delta)
            if is_plain and choice.finish is None:  # Fast path of almost every token.
                events.append(TextDelta(i, text, choice.last_tokens, choice.last_logprobs))
            else:
                self._say(i, text, delta.version, events)
        return events

    def usage(self) -> Usage:
        """Return the token counts so far."""
        choices = self._choices
        completion = choices[0].count if len(choices) == 1 else sum([choice.count for choice in choices])
        return Usage(self._prompt_tokens, self._cached, completion, self._reasoning, self._accepted, self._rejected)

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each choice so far."""
        return [choice.count for choice in self._choices]

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of each choice so far."""
        return [choice.tokens for choice in self._choices]

    @property
    def reasons(self) -> list[FinishReason | None]:
        """The reason why each choice has ended; None for one that has not ended."""
        return [choice.finish for choice in self._choices]

    def _read(self, prompt: int, delta: Delta, events: list[Event]) -> None:
        """Append the event that a prompt was read if `delta` is the first delta of its choices."""
        if prompt in self._unread:
            self._unread.discard(prompt)
            self._cached += delta.cached
            events.append(PromptRead(prompt, delta.cached, delta.prompt_logprobs, delta.embedding))

    def _say(self, i: int, text: str, version: int, events: list[Event]) -> None:
        """Append the events of a choice's newest piece of text, and its end if it has ended."""
        choice = self._choices[i]
        versions: tuple[int, ...] = ()
        if self._version is not None:
            versions = (version or self._version,) * len(choice.last_tokens)
        details = choice.last_tokens, choice.last_logprobs, versions
        if self._running_usage:
            events.append(self.usage())
        if self._parsers is not None:
            details = self._parse(i, text, details, events)
        elif text or choice.finish is None:
            events.append(TextDelta(i, text, *details))
            details = NO_DETAILS
        if choice.finish is not None:
            events.append(Finish(i, choice.finish, choice.stop, *details))
            if choice.stopped:
                self._stream.cancel(i)

    def _parse(self, i: int, text: str, details: Details, events: list[Event]) -> Details:
        """Append the events that the choice's parser makes of `text`; return the details that no event carries yet.

        The first of the events carries the details of all tokens since the last event.
        """
        assert self._parsers is not None
        parser, held, choice = self._parsers[i], self._held[i], self._choices[i]
        said: list[Said] = [*parser.push(text)]
        if held is not NO_DETAILS:
            details = held[0] + details[0], held[1] + details[1], held[2] + details[2]
        elif (
            len(said) == 1 and type(said[0]) is TextDelta and choice.finish is None and self._stops is None
        ):  # Fast path of most tokens.
            events.append(TextDelta(i, said[0].text, *details))
            return NO_DETAILS
        if choice.finish is not None:
            said += parser.flush(cut=choice.finish != "stop")
        if self._stops is not None:
            said = self._stopped(i, said)
        most = self._most_calls
        over = (k for k, event in enumerate(said) if isinstance(event, ToolCallStart) and event.call == most)
        if (end := next(over, None)) is not None:
            del said[end:]
            choice.stop_here()
        if said:
            tokens, logprobs, versions = details
            said[0] = structs.replace(said[0], tokens=tokens, logprobs=logprobs, versions=versions)
            if isinstance(said[0], ReasoningDelta):
                self._reasoning += len(tokens)
            details = NO_DETAILS
            events += said
        self._held[i] = details
        return details

    def _stopped(self, i: int, said: Sequence[Said]) -> list[Said]:
        """Return the events of a choice up to its first stop string, which is looked for in its text only."""
        assert self._stops is not None
        scanner, choice = self._stops[i], self._choices[i]
        assert scanner is not None
        scanner.armed = choice.count > self._min_tokens
        kept: list[Said] = []
        for event in said:
            text = scanner.push(event.text) if isinstance(event, TextDelta) else scanner.flush()
            if text:
                kept.append(TextDelta(i, text))
            if scanner.hit is not None:
                choice.stop_here(scanner.hit)
                return kept
            if not isinstance(event, TextDelta):
                kept.append(event)
        if choice.finish is not None and (rest := scanner.flush()):
            kept.append(TextDelta(i, rest))
        return kept


def _one_by_one(delta: Delta) -> Iterator[Delta]:
    """Yield a delta as deltas of one token each, so that a stop string ends a choice at the token that completes it."""
    last = len(delta.tokens) - 1
    if last <= 0:
        yield delta
        return
    for k, token in enumerate(delta.tokens):
        logprobs = delta.logprobs[k : k + 1] if delta.logprobs else delta.logprobs
        finish = delta.finish if k == last else None
        yield structs.replace(delta, tokens=(token,), logprobs=logprobs, finish=finish)

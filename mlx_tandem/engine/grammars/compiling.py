"""Compiling grammars with llguidance, within limits that are the same in the engine and in the front's check."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer as Backend

from mlx_tandem.errors import InvalidRequest

STATES = (4096, 16_384, 50_000)
"""Numbers of states that a lexer may have. One that needs more of them is replaced by one of the next size."""

LIMITS = {
    states: LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=states,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    for states in STATES
}
"""Limits of one grammar, by the number of its lexer's states. The fuel of one mask lasts for about 15 ms; the items of
an ambiguous grammar are no such bound, and a mask of one was seen to take two seconds.
"""

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SPACE = r"[\x20\x0A\x0D\x09]"

SLICES = [
    f"{_SPACE}+",
    *(f"{_IN_STRING}{{1,{most}}}" for most in (*range(1, 11), 15, 20, 30)),
    f"{_IN_STRING}+",
]
"""Groups of tokens, which llguidance calls slices. Where all tokens of a group may come next, llguidance allows the
whole group at once; elsewhere it tests each token.

In a JSON string with a maximum length, the tokens that still fit form such a group. The tokens of llguidance's own
groups have at most 10 characters, at most 30, or any number. Where fewer than 10 characters are left, none of these
groups fits, and a mask of 150,000 tokens takes a millisecond.
"""

_QUOTED_LINE = re.compile(r"\d+ \|")

MOST_REASON = 300
"""Most characters that an error repeats of llguidance's own words."""


def open_tokenizer(folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Return llguidance's view of a model's tokenizer. It releases the interpreter, and takes a second for 65k tokens.

    Raises InvalidRequest for a tokenizer that llguidance cannot use.
    """
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        tokens = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return LLTokenizer(backend.to_str(), n_vocab=tokens, eos_token=sorted(eos_token_ids), slices=SLICES)
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise InvalidRequest(f"this model's tokenizer allows no structured output: {reason(str(e))}") from e


class LexerFull(InvalidRequest):
    """Raised when a lexer needs more states than it may have."""


def compiled(tokenizer: LLTokenizer, grammar: str, states: int = STATES[-1]) -> LLMatcher:
    """Return a matcher at the beginning of a text, whose lexer may have so many states. It releases the interpreter.

    Raises InvalidRequest for a grammar that is not valid, is over LIMITS, or allows no text, and LexerFull.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS[states])
    if matcher.is_error():
        raise InvalidRequest(reason(matcher.get_error()))
    matcher.compute_bitmask()  # a rule that never ends is found by the first mask
    if matcher.is_error():
        error = LexerFull if has_broken_lexer(matcher) else InvalidRequest
        raise error(f"no text begins to match ({reason(matcher.get_error())})")
    return matcher


def has_broken_lexer(matcher: LLMatcher) -> bool:
    """Return whether a matcher fails because of its lexer, which then fails for all copies of the matcher."""
    return bool(matcher.get_error().startswith("lexer error"))


def reason(words: str) -> str:
    """Return the part of an error of llguidance that says what is wrong, on one line."""
    lines = [line.strip() for line in words.replace("<non-verbose/>", "").splitlines()]
    said = " ".join(line for line in lines if line.strip("^ ") and not _QUOTED_LINE.match(line))
    return said[:MOST_REASON]

"""Rewards that compare with a reference in `metadata.answer`: gsm8k, exact_match and contains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from msgspec import Struct

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import MAX_REWARD_ANSWERS
from mlx_tandem.training.rewards.messages import Sample
from mlx_tandem.training.rewards.said import said

MAX_DIGITS = 32  # of a number that is compared, and the largest exponent
MARKER = "####"
BOX = "\\boxed{"
NEAR = 256  # characters that an answer may be long
TAIL = 16_384  # characters at the end that are searched for a digit
SPACELESS = 0x2E80  # characters from here on are of scripts that put no spaces between words
WIDEST = 3 * MAX_DIGITS  # characters of a number: longer ones have too many digits

_THOUSANDS = r"[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:[ \u00a0\u202f][0-9]{3})+)(?![0-9])"
_DIGITS = rf"(?:{_THOUSANDS}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"((?<![0-9A-Za-z)\]}}])[-+−]\s?)?(?:\\?[$€£]\s?([-−])?)?({_DIGITS})(?:[eE]([-+]?[0-9]+))?(?:\s?/\s?({_DIGITS}))?"
)
_GROUPING = re.compile("[, \u00a0\u202f]")
_DIGIT = re.compile(r"[0-9]")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,64})\}\{([^{}]{1,64})\}")


class NoOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a reward that has none."""


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of rewards that compare texts."""

    strip: bool = True  # white space around both
    ignore_case: bool = False

    def of(self, text: str) -> str:
        """Return a text in the form in which it is compared."""
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


# -- gsm8k ----------------------------------------------------------------------------------------------------------


def gsm8k(sample: Sample, options: NoOptions) -> float:
    """Return 1 when the completion's answer is exactly the number of the reference, else 0."""
    expected = reference(str(sample.metadata["answer"]))
    return float(expected is not None and answer(said(sample.completion)) == expected)


def needs_number(options: NoOptions, metadata: Mapping[str, Any]) -> None:
    """Raise InvalidRequest when the metadata have no number to compare with."""
    if reference(_text(metadata)) is None:
        raise InvalidRequest(f"metadata.answer has no number of up to {MAX_DIGITS} digits", param="metadata.answer")


@lru_cache(maxsize=4096)
def reference(text: str) -> Fraction | None:
    """Return the answer of a reference solution, which may be no more than the number."""
    return answer(text)


def answer(text: str) -> Fraction | None:
    r"""Return the number on the line of the last `####`, in the last `\boxed{…}`, or else the last of all."""
    if (at := text.rfind(MARKER)) >= 0:
        near = text[at + len(MARKER) :][:NEAR]
        if numbers := _numbers(near.lstrip().partition("\n")[0]):
            return _value(numbers[0])
    if (at := text.rfind(BOX)) >= 0 and (numbers := _numbers(_boxed(text[at + len(BOX) :][:NEAR]))):
        return _value(numbers[-1])
    return _last(text)


def _last(text: str) -> Fraction | None:
    # The pattern is slow on prose: it looks only at what lies around the last digit.
    digit = _DIGIT.search(text[-TAIL:][::-1])
    if digit is None:
        return None
    end = len(text) - digit.start()
    numbers = _numbers(text[max(0, end - WIDEST) : end + 1])  # with the brace that closes a \frac
    return _value(numbers[-1]) if numbers else None


def _boxed(text: str) -> str:
    """Return `text` up to the brace that closes the box, or nothing when none does."""
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return text[:i]
    return ""


def _numbers(text: str) -> list[tuple[str, ...]]:
    if "{" in text:
        text = _FRACTION.sub(r"\1/\2", text.replace("{,}", ","))
    return _NUMBER.findall(text)


def _value(number: tuple[str, ...]) -> Fraction | None:
    """Return a number; None for one whose size would make arithmetic slow, and for a zero denominator."""
    sign, inner, digits, exponent, denominator = number
    if len(digits) > MAX_DIGITS or len(denominator) > MAX_DIGITS or len(exponent) > 4:
        return None
    power = int(exponent or 0)
    below = Fraction(_GROUPING.sub("", denominator)) if denominator else 1
    if abs(power) > MAX_DIGITS or not below:
        return None
    digits = _GROUPING.sub("", digits)
    value = Fraction(int(digits) if digits.isdigit() else digits)
    if power:
        value *= Fraction(10) ** power
    value /= below
    return -value if sign[:1] in ("-", "−") or inner else value


# -- texts ----------------------------------------------------------------------------------------------------------


def exact_match(sample: Sample, options: TextOptions) -> float:
    """Return 1 when the completion is the reference, else 0."""
    return float(options.of(said(sample.completion)) == options.of(_text(sample.metadata)))


def needs_text(options: TextOptions, metadata: Mapping[str, Any]) -> None:
    """Raise InvalidRequest when the metadata have no text to compare with."""
    _text(metadata)


def contains(sample: Sample, options: TextOptions) -> float:
    """Return the share of the references that the completion contains as whole words."""
    text, wanted = options.of(said(sample.completion)), _texts(sample.metadata)
    return sum(_has_words(text, options.of(w)) for w in wanted) / len(wanted)


def _has_words(text: str, wanted: str) -> bool:
    """Return whether `wanted` is in the text and neither begins nor ends inside of a word."""
    at = text.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        inside = _joins(text[at - 1 : at] + wanted[:1]) or _joins(wanted[-1:] + text[end : end + 1])
        if not inside:
            return True
        at = text.find(wanted, at + 1)
    return False


def _joins(pair: str) -> bool:
    """Return whether two neighbouring characters belong to one word. Scripts without spaces have no such words."""
    return len(pair) == 2 and all(c.isalnum() and ord(c) < SPACELESS for c in pair)


def needs_texts(options: TextOptions, metadata: Mapping[str, Any]) -> None:
    """Raise InvalidRequest when the metadata have no texts to look for, or an empty one."""
    if not all(options.of(w) for w in _texts(metadata)):
        raise InvalidRequest("metadata.answer is empty: every text contains that", param="metadata.answer")


def _text(metadata: Mapping[str, Any]) -> str:
    value = _present(metadata)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InvalidRequest("metadata.answer must be a string or a number", param="metadata.answer")
    return str(value)


def _texts(metadata: Mapping[str, Any]) -> list[str]:
    value = _present(metadata)
    if not isinstance(value, (list, tuple)):
        return [_text(metadata)]
    if not 1 <= len(value) <= MAX_REWARD_ANSWERS or not all(isinstance(v, str) for v in value):
        raise InvalidRequest(
            f"metadata.answer must be a string or a list of 1 to {MAX_REWARD_ANSWERS} strings", param="metadata.answer"
        )
    return list(value)


def _present(metadata: Mapping[str, Any]) -> object:
    if metadata.get("answer") is None:
        raise InvalidRequest(
            "metadata.answer is missing: the scoring function compares with it", param="metadata.answer"
        )
    return metadata["answer"]

"""Texts of any kind for properties: control characters, halves of surrogate pairs, very long ones."""

from __future__ import annotations

import unicodedata

from hypothesis import strategies as st

_CHARACTERS = st.characters() | st.sampled_from("\0\t\n\r\x1b\x7f\x85\u2028\u2029\u202e\ud800\udbff\udc00\udfff")
_LONG = st.builds(lambda text, times: text * times, st.text(_CHARACTERS, min_size=1, max_size=4), st.integers(1, 1000))

ANY_TEXT = st.text(_CHARACTERS, max_size=30) | _LONG


def is_safe(text: str) -> bool:
    """Whether `text` is one line that can be encoded and that steers no terminal."""
    return not any(
        unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in _STEERING for c in text
    )


_STEERING = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}

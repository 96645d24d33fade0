"""A prompt's text in parts."""

from __future__ import annotations

Part = tuple[str, bool]
"""A piece of a prompt, and whether it is plain: no special token is read out of a plain piece, whatever it spells."""

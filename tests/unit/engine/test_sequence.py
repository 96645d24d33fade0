"""A sequence that continues under another version, which may begin elsewhere in its prompt."""

from __future__ import annotations

import pytest

from mlx_tandem.engine.sequence import Sequence, adapter_start_of
from mlx_tandem.types import AdapterRef, Request, SamplingParams

PROMPT = (1, 7, 8, 2, 7, 9, 3)
FIRST = AdapterRef("p", 1, "d1", invocation=(7, 8))


@pytest.mark.parametrize(
    ("invocation", "digest", "start"),
    [((7, 9), "d2", 4), ((), "d2", 0), ((5,), "d2", None), ((7, 8), "d2", 1), ((7, 9), "d1", 1)],
)
def test_another_version_applies_from_where_it_is_invoked_itself(
    invocation: tuple[int, ...], digest: str, start: int | None
) -> None:
    """Nothing changes where another version has the same weights."""
    s = Sequence(0, Request(0, PROMPT, SamplingParams(8), FIRST, follow=True), 0, frozenset())
    s.adapter_start = 1
    before = s.chain = object()  # type: ignore[assignment]
    ref = s.next_adapter = AdapterRef("p", 2, digest, invocation=invocation)
    s.go_under(ref)
    assert (s.adapter, s.next_adapter, s.adapter_digest) == (ref, None, digest)
    assert s.adapter_start == (adapter_start_of(ref, PROMPT) if start is None else start)
    assert s.chain is (before if digest == "d1" else None)

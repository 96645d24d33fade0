"""The books of blocks: what choices of one request share, and what of it others may find."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.prefix_leaders import WORTH_WAITING
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.hashing import Namespace
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.kv.prefix import PrefixCache
from mlx_tandem.types import AdapterRef, Request, SamplingParams

SIZE = 4
PROMPT = tuple(range(1, 2 * SIZE + 2))
"""Two whole blocks, and the token that each choice computes itself."""


def tables(blocks: int = 32) -> BlockManager:
    group = AttentionGroup(BlockPool(blocks, SIZE))
    return BlockManager([group], [PrefixCache(group, Namespace("weights", "tokenizer", "float32", SIZE))])


def choice(number: int, version: int) -> Sequence:
    """A choice of a request to the adapter `p`."""
    adapter = AdapterRef("p", version, f"p{version}")
    return Sequence(number, Request(number, PROMPT, SamplingParams(8), adapter, follow=True), 0, frozenset())


def found(books: BlockManager, version: int) -> int:
    """How many whole blocks a new request of this version finds."""
    return books.match(choice(9, version)).whole


@pytest.mark.parametrize(
    ("mixed", "versions"),
    [
        ((), (1, 1)),
        (("leader",), (1, 1)),
        (("follower",), (1, 1)),
        (("leader", "follower"), (1, 1)),
        ((), (1, 2)),
        ((), (2, 1)),
    ],
)
def test_a_choice_that_parts_is_found_by_others_only_if_one_version_has_computed_all_of_it(
    mixed: tuple[str, ...], versions: tuple[int, int]
) -> None:
    """Neither it nor the one that it parts from has gone on under another version, and both are of the same one now."""
    books = tables()
    leader, follower = choice(0, versions[0]), choice(1, versions[1])
    books.begin(leader)
    leader.scheduled = len(PROMPT) - 1
    for name in mixed:
        books.mix(leader if name == "leader" else follower)
    assert books.fork(leader, follower)
    assert follower.table == leader.table[: len(follower.table)], "it shares what is computed"
    is_pure = not mixed and versions[0] == versions[1]
    assert follower.is_pure is is_pure
    assert books.reserve(follower, len(PROMPT))
    follower.scheduled += 1
    follower.tokens.append(7)
    books.publish(follower)  # its first token was drawn from all of the prompt
    assert [found(books, version) for version in (1, 2)] == [2 if is_pure else 0, 0]
    books.leave(follower)
    assert follower.is_pure, "what it computes when it is seated again is its own"
    books.leave(leader)


ENOUGH = WORTH_WAITING // SIZE
"""Blocks that make waiting worthwhile."""

URGENCY = st.tuples(st.booleans(), st.integers(0, 1))
"""Whether a sequence is made for training, and its priority: the lower one is more urgent."""

ALIKE = (False, 0), (False, 0)


def reading(number: int, tokens: range, name: str, urgency: tuple[bool, int]) -> Sequence:
    background, priority = urgency
    request = Request(
        number,
        tuple(tokens),
        SamplingParams(8),
        AdapterRef("p", 1, name),
        priority=priority,
        background=background,
        follow=True,
    )
    return Sequence(number, request, 0, frozenset())


@given(
    length=st.integers(1, 3 * WORTH_WAITING),
    common=st.integers(-1, 4) | st.integers(0, 3 * ENOUGH),
    own=st.integers(0, 2 * SIZE),
    computed=st.integers(0, 3 * WORTH_WAITING),
    urgencies=st.tuples(URGENCY, URGENCY),
    name=st.sampled_from(["p1", "p1", "p1", "p2"]),
    moves=st.sampled_from([False, False, True]),
    extra=st.integers(0, SIZE - 1),
)
@example(length=WORTH_WAITING, common=ENOUGH, own=0, computed=0, urgencies=ALIKE, name="p1", moves=False, extra=1)
@example(
    length=2 * WORTH_WAITING, common=2 * ENOUGH, own=0, computed=0, urgencies=ALIKE, name="p1", moves=False, extra=1
)
def test_a_sequence_waits_for_another_that_reads_enough_of_its_prompt_and_is_as_urgent(
    length: int,
    common: int,
    own: int,
    computed: int,
    urgencies: tuple[tuple[bool, int], tuple[bool, int]],
    name: str,
    moves: bool,
    extra: int,
) -> None:
    """It shares `common` blocks with the other one's prompt, or one less than is enough, and has a few `own` tokens. It
    need not wait for the `extra` tokens that it could copy now. The other keeps its state where they part."""
    books = tables(256)
    shared = min((ENOUGH - 1 if common < 0 else common) * SIZE, length)
    leader = reading(0, range(length), "p1", urgencies[0])
    books.begin(leader)
    leader.scheduled = min(computed, length - 1)
    if moves:
        leader.next_adapter = AdapterRef("p", 2, "p3")
    tokens = [*range(shared), *range(1000, 1000 + own + 1)]
    follower = reading(1, range(0), name, urgencies[1])
    follower.tokens[:] = tokens
    saved = min(shared, len(tokens) - 1) // SIZE * SIZE
    worth = saved - extra >= max(WORTH_WAITING, (length - leader.scheduled) / 2)
    waits = worth and name == "p1" and not moves and urgencies[0] <= urgencies[1]
    match = books.match(follower)
    assert match.whole == 0
    match = replace(match, extra=extra)
    before = set(leader.boundaries)
    assert books.leaders.leader(follower, match) is (leader if waits else None)
    assert leader.boundaries == (before | {saved // SIZE} if waits else before)
    books.publish(leader)
    assert books.leaders.leader(follower, match) is None, "its blocks are found now, or nobody's"

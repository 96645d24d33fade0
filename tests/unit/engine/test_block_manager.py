"""The books of blocks: what choices of one request share, and what of it others may find."""

from __future__ import annotations

import pytest

from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.hashing import Namespace
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.kv.prefix import PrefixCache
from mlx_tandem.types import AdapterRef, Request, SamplingParams

SIZE = 4
PROMPT = tuple(range(1, 2 * SIZE + 2))
"""Two whole blocks, and the token that each choice computes itself."""


def tables() -> BlockManager:
    group = AttentionGroup(BlockPool(32, SIZE))
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

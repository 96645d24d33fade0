"""The prefix cache against a plain model of it: what is found was published under the same name, and is still there."""

from __future__ import annotations

from hashlib import sha256
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.groups.state import StateGroup
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.hashing import FORMAT, ROOT, Chain, Namespace, block_key, content_of
from mlx_tandem.kv.pool import SCRATCH, BlockPool, Window
from mlx_tandem.kv.prefix import Match, PrefixCache, PrefixCounts, find

BASE = Namespace("weights", "tokenizer", "float32", 4)
OTHERS = {
    "weights": "others",
    "tokenizer": "another",
    "dtype": "bfloat16",
    "block_size": 8,
    "kv_bits": 8,
    "kv_group_size": 64,
    "positions": "yarn",
    "layout": "1/2",
    "adapter": "digest",
    "scope": "tenant",
    "format": 2,
}


@pytest.mark.promise("FLT-25")
def test_every_part_of_the_namespace_alone_makes_another() -> None:
    assert set(OTHERS) == set(Namespace.__struct_fields__), "a part that is not tried here"
    digests = {BASE.digest()}
    digests |= {msgspec.structs.replace(BASE, **{name: value}).digest() for name, value in OTHERS.items()}
    assert len(digests) == 1 + len(OTHERS)
    assert msgspec.structs.replace(BASE).digest() == BASE.digest()


def test_parts_do_not_run_into_each_other() -> None:
    assert Namespace("ab", "c", "float32", 4).digest() != Namespace("a", "bc", "float32", 4).digest()


def test_what_is_in_one_namespace_is_not_found_in_another() -> None:
    for name, value in OTHERS.items():
        pool = BlockPool(8, 4)
        cache = PrefixCache(AttentionGroup(pool), BASE)
        table = pool.allocate(2) or []
        cache.publish(cache.chain(""), range(8), table)
        assert find([cache], cache.chain(""), range(9)).tables[0] == table
        other = Chain(msgspec.structs.replace(BASE, **{name: value}).digest())
        assert find([cache], other, range(9)).tables[0] == [], name
        assert find([cache], other, range(7)).extra == 0, name


def test_a_key_depends_on_namespace_parent_and_tokens() -> None:
    one = BASE.digest()
    keys = {
        block_key(one, ROOT, (1, 2)),
        block_key(one, ROOT, (2, 1)),
        block_key(one, ROOT, (1, 2, 0)),
        block_key(one, block_key(one, ROOT, (9,)), (1, 2)),
        block_key(bytes(32), ROOT, (1, 2)),
    }
    assert len(keys) == 5
    assert all(len(key) == 32 for key in keys)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=32),
    place=st.integers(0, 31),
    bit=st.integers(0, 31),
)
def test_every_bit_of_every_token_makes_another_key(tokens: list[int], place: int, bit: int) -> None:
    """Vocabularies are larger than 2**16: no token may be cut to fewer bits than its id has."""
    other = list(tokens)
    other[place % len(tokens)] ^= 1 << bit
    assert block_key(BASE.digest(), ROOT, tokens) != block_key(BASE.digest(), ROOT, other)


def test_a_key_is_what_is_written_on_drives() -> None:
    """The bytes that are hashed are part of the format: another order, width or padding needs another FORMAT."""
    namespace, parent, tokens = bytes(range(32)), bytes(range(32, 64)), (0, 1, 65_535, 65_536, 151_643, 2**32 - 1)
    written = namespace + parent + b"".join(token.to_bytes(4, "little") for token in tokens)
    assert block_key(namespace, parent, tokens) == sha256(written).digest()
    assert FORMAT == 1


@given(
    digest=st.binary(min_size=16, max_size=16), first=st.integers(0, 5000), counts=st.tuples(*[st.integers(0, 9)] * 2)
)
def test_every_part_of_an_image_has_a_number_of_its_own(digest: bytes, first: int, counts: tuple[int, int]) -> None:
    """However its placeholders are cut into runs, and larger than those of all tokens."""
    before, behind = counts
    whole = content_of(digest, first, before + behind)
    assert whole == content_of(digest, first, before) + content_of(digest, first + before, behind)
    other = content_of(bytes([digest[0] ^ 1]) + digest[1:], first, before + behind)
    assert len({*whole, *other}) == 2 * len(whole) and min([*whole, *other], default=1 << 32) > 2**32 - 1


DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(digest=DIGESTS, place=st.integers(0, 63), character=st.sampled_from("0123456789abcdef"))
def test_every_character_of_an_adapter_s_digest_makes_another_namespace(
    digest: str, place: int, character: str
) -> None:
    """Within one cache, which remembers the digests of namespaces by their adapter: none is cut to a beginning."""
    other = digest[:place] + character + digest[place + 1 :]
    cache = PrefixCache(AttentionGroup(BlockPool(2, 4)), BASE)
    roots = {cache.chain(adapter).namespace(0) for adapter in (digest, other, "")}
    assert len(roots) == 2 + (other != digest)
    assert cache.chain(digest).namespace(0) == msgspec.structs.replace(BASE, adapter=digest).digest()


@pytest.mark.parametrize("alike", [1, 8, 16, 32, 63])
def test_adapters_whose_digests_begin_alike_share_nothing(alike: int) -> None:
    one, other = "a" * 64, "a" * alike + "b" * (64 - alike)
    pool = BlockPool(8, 4)
    cache = PrefixCache(AttentionGroup(pool), BASE)
    table = pool.allocate(2) or []
    cache.publish(cache.chain(one), range(8), table)
    assert find([cache], cache.chain(other), range(9)) == Match([[]], [SCRATCH], 0)
    assert find([cache], cache.chain(one), range(9)).tables[0] == table


def test_roots_that_are_remembered_are_few_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_tandem.kv.prefix.MAX_ROOTS", 3)
    cache = PrefixCache(AttentionGroup(BlockPool(2, 4)), BASE)
    for turn in range(3):
        for i in range(8):
            root = cache.chain(f"{i:064x}").namespace(0)
            assert root == msgspec.structs.replace(BASE, adapter=f"{i:064x}").digest(), turn
            assert len(cache._roots) <= 3


def test_a_block_is_shared_exactly_where_the_same_adapters_compute_all_positions_up_to_its_end() -> None:
    """Adapters that apply from a position on: the base computes what is before it, also inside of a block."""
    cache = PrefixCache(AttentionGroup(BlockPool(2, 4)), BASE)
    seen: dict[bytes, tuple[str, ...]] = {}
    for adapter, start in [("", 0), *product(("a", "b"), range(14))]:
        chain = cache.chain(adapter, start)
        who = tuple("" if at < start else adapter for at in range(12))
        for block in range(3):
            key, computed = chain.key(block, [7] * 12, 4), who[: 4 * block + 4]
            assert seen.setdefault(key, computed) == computed, f"{adapter} from {start} on, block {block}"
    assert len(seen) == len(set(seen.values())), "what is computed alike has one key"


def test_what_is_counted_and_told_of_blocks_that_come_and_go() -> None:
    """Counters are of all blocks; only whole ones are told of, since only these go to a drive."""
    pool = BlockPool(4, 4)
    cache = PrefixCache(AttentionGroup(pool), BASE)
    filled: list[tuple[int, ...]] = []
    evicted: list[tuple[int, ...]] = []
    cache.on_fill = lambda entry: filled.append(entry.tokens)
    cache.on_evict = lambda entry: evicted.append(entry.tokens)
    table = pool.allocate(3) or []
    cache.publish(cache.chain(""), range(10), table)
    cache.note(12, 8)
    cache.note(5, 1)
    assert filled == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cache.counts() == PrefixCounts(blocks=3, queries=17, hits=9, evictions=0)
    pool.release(reversed(table))
    assert set(pool.allocate(2) or []) == {*table[1:]}
    assert (evicted, cache.counts()) == ([(4, 5, 6, 7)], PrefixCounts(1, 17, 9, 2))
    cache.drop([table[0]])
    assert (evicted, cache.counts()) == ([(4, 5, 6, 7)], PrefixCounts(0, 17, 9, 2)), "it was not given out"


def test_of_two_blocks_with_the_same_content_the_one_that_is_read_is_found() -> None:
    pool = BlockPool(6, 4)
    cache = PrefixCache(AttentionGroup(pool), BASE)
    first, second, third = (pool.allocate(1) or [] for _ in range(3))
    cache.publish(cache.chain(""), range(4), first)
    cache.publish(cache.chain(""), range(4), second)
    assert find([cache], cache.chain(""), range(5)).tables[0] == first, "somebody reads it"
    pool.release(first)
    cache.publish(cache.chain(""), range(4), third)
    assert find([cache], cache.chain(""), range(5)).tables[0] == third, "it is found for longer"
    assert pool.is_vacant(first[0]) and pool.kept() == {third[0]}
    cache.check()


TEXT = st.lists(st.integers(0, 3), min_size=16, max_size=20)


@given(shared=st.integers(0, 4), known=st.integers(0, 4), texts=st.tuples(TEXT, TEXT), first=st.integers(0, 3))
def test_the_keys_of_a_sequence_that_parts_from_another_are_those_of_its_own_tokens(
    shared: int, known: int, texts: tuple[list[int], list[int]], first: int
) -> None:
    """Whichever of the two goes on first."""
    own = [[*texts[0][: 4 * shared], *text] for text in texts]
    root, base = BASE.digest(), bytes(32)
    chain = Chain(root, base, first)
    for block in range(min(shared, known)):
        chain.key(block, own[0], 4)
    chains = chain, chain.fork()
    for block in range(min(map(len, own)) // 4):
        for each, tokens in zip(chains, own, strict=True):
            assert each.key(block, tokens, 4) == Chain(root, base, first).key(block, tokens, 4)


def group_of(kind: str, window: int, pool: BlockPool) -> CacheGroup:
    if kind == "window":
        return WindowGroup(pool, Window(window, 8))
    return StateGroup(pool) if kind == "state" else AttentionGroup(pool)


@given(
    kinds=st.lists(st.sampled_from(["attention", "window", "state"]), min_size=1, max_size=3),
    window=st.integers(1, 20),
    gone=st.lists(st.sets(st.integers(0, 7)), min_size=3, max_size=3),
    length=st.integers(1, 33),
)
def test_the_longest_prefix_is_found_of_which_every_group_has_what_it_needs(
    kinds: list[str], window: int, gone: list[set[int]], length: int
) -> None:
    """Of eight blocks some are gone in each group. A group needs the blocks that the position behind a prefix sees."""
    caches, tables = [], []
    for kind, lost in zip(kinds, gone, strict=False):
        pool = BlockPool(9, 4)
        cache = PrefixCache(group_of(kind, window, pool), BASE)
        table = pool.allocate(8) or []
        cache.publish(cache.chain(""), range(32), table)
        cache.drop([table[i] for i in lost])
        caches.append(cache)
        tables.append([SCRATCH if i in lost else b for i, b in enumerate(table)])

    def has(whole: int) -> bool:
        needed = [range(cache.group.first_needed(4 * whole) if whole else 0, whole) for cache in caches]
        return all(SCRATCH not in [table[i] for i in own] for table, own in zip(tables, needed, strict=True))

    longest = max(whole for whole in range(length // 4 + 1) if has(whole))
    found = find(caches, caches[0].chain(""), range(length))
    assert found.whole == longest
    for cache, table, own in zip(caches, tables, found.tables, strict=True):
        first = cache.group.first_needed(4 * longest)
        assert own == [SCRATCH] * min(first, longest) + table[first:longest]
    rest = min(length - 4 * longest, 4)  # of which all is found where the block is there
    there = all(
        cache.group.divides and SCRATCH not in [*t[longest : longest + 1]]
        for cache, t in zip(caches, tables, strict=True)
    )
    assert found.extra == (rest if there and rest >= 2 else 0)


def test_a_state_after_more_tokens_than_agree_is_not_copied() -> None:
    """Another group has the block only in part."""
    caches = []
    for kind, length in (("attention", 7), ("state", 8)):
        pool = BlockPool(4, 4)
        caches.append(PrefixCache(group_of(kind, 0, pool), BASE))
        caches[-1].publish(caches[-1].chain(""), range(length), pool.allocate(2) or [])
    for order in (caches, caches[::-1]):
        found = find(order, order[0].chain(""), range(9))
        assert (found.whole, found.extra) == (1, 0)
    assert find(caches[:1], caches[0].chain(""), range(9)).extra == 3


@pytest.mark.promise("F8")
def test_an_equal_key_with_other_tokens_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the hash to collide, or be made to: tokens are compared, too."""
    monkeypatch.setattr("mlx_tandem.kv.hashing.block_key", lambda namespace, parent, tokens: bytes(32))
    pool = BlockPool(8, 4)
    cache = PrefixCache(AttentionGroup(pool), BASE)
    cache.publish(cache.chain(""), (1, 2, 3, 4), pool.allocate(1) or [])
    assert find([cache], cache.chain(""), (4, 3, 2, 1, 0)).tables[0] == []
    assert find([cache], cache.chain(""), (1, 2, 3, 4, 0)).tables[0] != []


def test_another_block_size_than_the_pool_s_is_a_bug_that_says_so() -> None:
    with pytest.raises(ValueError):
        PrefixCache(AttentionGroup(BlockPool(8, 16)), BASE)


def test_the_longest_agreement_of_what_follows_is_found() -> None:
    pool = BlockPool(32, 8)
    cache = PrefixCache(AttentionGroup(pool), msgspec.structs.replace(BASE, block_size=8))
    blocks = {}
    for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 4, 9, 9), (1, 2, 3, 9), (1, 2, 3, 4, 5, 6, 7, 8), (0,) * 8):
        (blocks[tokens],) = pool.allocate(1) or []
        cache.publish(cache.chain(""), tokens, [blocks[tokens]])
    found = find([cache], cache.chain(""), (1, 2, 3, 4, 5, 6, 7))
    assert (found.sources[0], found.extra) == (blocks[1, 2, 3, 4, 5, 6, 7, 8], 7)
    found = find([cache], cache.chain(""), (1, 2, 3, 4, 9, 9, 9, 1))
    assert (found.sources[0], found.extra) == (blocks[1, 2, 3, 4, 9, 9], 6)
    assert find([cache], cache.chain(""), (1, 2, 3, 8, 8, 8, 8)).extra == 0, "too few to copy"


def test_leaves_go_before_what_they_follow_and_the_longest_unread_first() -> None:
    pool = BlockPool(9, 4)
    cache = PrefixCache(AttentionGroup(pool), BASE)
    tables = []
    for first in (0, 100):
        tables.append(pool.allocate(4) or [])
        cache.publish(cache.chain(""), range(first, first + 16), tables[-1])
    for table in tables:
        pool.release(reversed(table))
    assert pool.free_blocks == 8
    for left in (3, 2, 1, 0):
        (block,) = pool.allocate(1) or []
        assert block == tables[0][left]
        assert len(find([cache], cache.chain(""), range(17)).tables[0]) == left
    assert len(find([cache], cache.chain(""), range(100, 117)).tables[0]) == 4
    assert cache.counts().evictions == 4


class CacheMachine(RuleBasedStateMachine):
    """Sequences over three tokens come, find, compute, publish and go; each block remembers who wrote what into it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(14, 2)
        self.cache = PrefixCache(AttentionGroup(self.pool), msgspec.structs.replace(BASE, block_size=2))
        self.held: list[tuple[str, list[int], list[int]]] = []
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}  # block → adapter, all tokens up to its end

    @rule(adapter=st.sampled_from(["", "a"]), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def come(self, adapter: str, tokens: list[int]) -> None:
        chain = self.cache.chain(adapter)
        found = find([self.cache], chain, tokens)
        for i, block in enumerate(found.tables[0]):
            assert self.written[block] == (adapter, tuple(tokens[: 2 * i + 2])), "another's block"
        if found.extra:
            known = 2 * found.whole + found.extra
            own, there = self.written[found.sources[0]]
            assert (own, there[:known]) == (adapter, tuple(tokens[:known])), "another's tokens"
        self.pool.share(found.tables[0])
        fresh = self.pool.allocate(self.pool.blocks_for(len(tokens)) - found.whole)
        if fresh is None:
            self.pool.release(reversed(found.tables[0]))
            return
        table = found.tables[0] + fresh
        for i in range(found.whole, len(table)):
            self.written[table[i]] = adapter, tuple(tokens[: 2 * i + 2])
        self.cache.publish(chain, tokens, table, found.whole)
        again = find([self.cache], self.cache.chain(adapter), tokens)
        assert again.whole == len(tokens) // 2, "what was published is not found"
        self.held.append((adapter, tokens, table))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        _, _, table = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(reversed(table))

    @rule(block=st.integers(1, 13))
    def spoil(self, block: int) -> None:
        self.cache.drop([block])

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.counts().blocks == 0

    @invariant()
    def books_agree(self) -> None:
        self.pool.check(table for _, _, table in self.held)
        self.cache.check()


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, derandomize=True)
TestCache = CacheMachine.TestCase

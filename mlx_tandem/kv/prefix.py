"""The prefix cache: which blocks of a pool hold which tokens, so that a shared prefix is computed once.

Each namespace has a tree of blocks. A full block is found by its key. Among the blocks that follow a given block, the
cache finds the one that shares most tokens with the rest of a prompt; it may be copied as far as the tokens agree.
Blocks that nobody reads any more stay until the pool has no other free blocks. A hit adds a reader and copies nothing.

Each cache group of a model has a cache of its own. A prefix counts as cached as far as all groups have it. A group that
gives blocks back has a prefix when it has the blocks that the position after it needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec.structs import replace

from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.hashing import Chain, Namespace
from mlx_tandem.kv.pool import SCRATCH

_TOKENS = attrgetter("tokens")

MAX_ROOTS = 4096
"""Most digests of namespaces that are kept; a dropped one is computed again when it is needed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of a block: `tokens` that follow the block with the key `parent`.

    Only a full block that everybody may find has a key. The namespace of a block that was set aside begins with its
    owner.
    """

    block: int
    tokens: tuple[int, ...]
    namespace: bytes
    parent: bytes
    key: bytes | None


@dataclass(frozen=True, slots=True)
class Match:
    """The cached prefix of a sequence.

    `tables` has the whole blocks in each pool, SCRATCH where no window reaches. `sources` has for each pool the block
    that follows them, whose first `extra` tokens agree.
    """

    tables: list[list[int]] = field(default_factory=lambda: [[]])
    sources: list[int] = field(default_factory=list)
    extra: int = 0

    @property
    def whole(self) -> int:
        """Number of whole blocks, the same in each pool."""
        return len(self.tables[0])


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Counters of a prefix cache since its start."""

    blocks: int = 0  # that can be found now
    queries: int = 0  # tokens that were looked up
    hits: int = 0  # of these, tokens that were found
    evictions: int = 0  # blocks


class PrefixCache:
    """The blocks that one cache group of a model can share. `namespace` names the model, without an adapter.

    A block is found only under the namespace, the preceding tokens and the own tokens that it was published with. At
    most one block is found for each such content. Among idle blocks, a block is given out before those that precede it
    in its sequence.
    """

    def __init__(self, group: CacheGroup, namespace: Namespace):
        pool = group.pool
        if namespace.block_size != pool.block_size:
            raise ValueError("the namespace has another block size than the pool")
        self.group = group
        self._pool = pool
        self._namespace = namespace
        self._roots: dict[str, bytes] = {}
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        # By namespace and key of a block: the entries that follow it, sorted by tokens.
        self._behind: dict[tuple[bytes, bytes], list[Entry]] = {}
        self._aside: dict[bytes, list[int]] = {}  # by owner: blocks that were set aside
        self._queries = self._hits = self._evictions = 0
        # Called with whole blocks that can be found from now on, and with those that are about to be given out.
        self.on_fill: Callable[[Entry], None] = lambda entry: None
        self.on_evict: Callable[[Entry], None] = lambda entry: None
        pool.on_evict = self._on_evict

    def note(self, queries: int, hits: int) -> None:
        """Count `queries` tokens of a prompt that were looked up and `hits` of them that were found and used."""
        self._queries += queries
        self._hits += hits

    def counts(self) -> PrefixCounts:
        """Return the counters of now."""
        return PrefixCounts(len(self._by_block), self._queries, self._hits, self._evictions)

    @property
    def block_size(self) -> int:
        """Token positions of a block."""
        return self._pool.block_size

    def chain(self, adapter: str, adapter_start: int = 0) -> Chain:
        """Return an empty chain for a sequence that runs under the adapter with this digest; "": the base model.

        The adapter computes the tokens from position `adapter_start` on, and the block that contains this position is
        in the adapter's namespace. The namespace includes the offset in that block: the last invocation depends on the
        whole prompt, so prompts with equal tokens in this block may have different offsets.
        """
        if not adapter_start:
            return Chain(self._root(adapter))
        first, within = divmod(adapter_start, self.block_size)
        return Chain(self._root(f"{adapter}+{within}" if within else adapter), self._root(""), first)

    def _root(self, adapter: str) -> bytes:
        """Return the digest of the namespace of this adapter."""
        root = self._roots.get(adapter)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[adapter] = replace(self._namespace, adapter=adapter).digest()
        return root

    def whole(self, chain: Chain, tokens: Sequence[int], most: int, owner: bytes = b"") -> list[int]:
        """Return the first blocks of a table for the longest cached prefix of `tokens`, `most` of them at most.

        Blocks that `owner` has set aside count, too.
        """
        blocks: list[int] = []
        if self.group.keeps_all:
            while len(blocks) < most and (block := self._block(chain, tokens, len(blocks), owner)) is not None:
                blocks.append(block)
            return blocks
        if most:
            chain.key(most - 1, tokens, self.block_size)
        while most:
            first = self.group.first_needed(most * self.block_size)
            at, blocks = most, []
            while at > first and (block := self._block(chain, tokens, at - 1, owner)) is not None:
                blocks.append(block)
                at -= 1
            if at == first:
                return [SCRATCH] * first + blocks[::-1]
            most = at - 1  # any longer prefix needs the block that is missing
        return []

    def part(self, chain: Chain, tokens: Sequence[int], at: int) -> tuple[int, int]:
        """Return the block that agrees longest with the tokens after the first `at` blocks, and how many tokens agree.

        Return (SCRATCH, 0) when less than half a block agrees: copying a block costs about as much as computing a few
        tokens.
        """
        size = self.block_size
        rest = tuple(tokens[at * size : (at + 1) * size])
        least = (size + 1) // 2 if self.group.divides else size + 1
        best = self._most_alike((chain.namespace(at), chain.parent(at)), rest) if len(rest) >= least else None
        extra = _shared(best.tokens, rest) if best else 0
        return (best.block, extra) if best and extra >= least else (SCRATCH, 0)

    def _block(self, chain: Chain, tokens: Sequence[int], i: int, owner: bytes) -> int | None:
        """Return the block that holds block number `i` of a sequence; None when there is none."""
        size = self.block_size
        entry, own = self._by_key.get(chain.key(i, tokens, size)), tuple(tokens[i * size : (i + 1) * size])
        if entry is None and owner in self._aside:
            entry = self._most_alike((owner + chain.namespace(i), chain.parent(i)), own)
        return entry.block if entry and entry.tokens == own else None

    def publish(self, chain: Chain, tokens: Sequence[int], table: Sequence[int], first: int = 0) -> int:
        """Let blocks of `table` be found, from number `first` on as far as `tokens` reach; return how many are full.

        All of them have readers, and their content for these tokens is computed and will not change. Where another
        block holds the same content and is read, that one stays; where nobody reads it, this one takes its place.
        Blocks that the sequence has given back are skipped.
        """
        size = self.block_size
        full, rest = divmod(len(tokens), size)
        end = full
        while end > first and not self._has_key(table[end - 1]):  # a cached block is cached with all before it
            end -= 1
        for i in range(max(end - 1, first), full):  # the last cached block may be cached in part
            if table[i] == SCRATCH:
                continue
            key, own = chain.key(i, tokens, size), tuple(tokens[i * size : (i + 1) * size])
            self._put(Entry(table[i], own, chain.namespace(i), chain.parent(i), key))
        if rest and self.group.divides:
            if full:
                chain.key(full - 1, tokens, size)
            own = tuple(tokens[full * size :])
            self._put(Entry(table[full], own, chain.namespace(full), chain.parent(full), None))
        return full

    def set_aside(self, owner: bytes, chain: Chain, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Let `owner` find the whole blocks of `table` that nobody can find yet, as far as `tokens` reach.

        Nothing has shown that their values are finite, so nobody else finds them before they are published.
        """
        size = self.block_size
        whole = len(tokens) // size
        if whole:
            chain.key(whole - 1, tokens, size)
        for i, block in enumerate(table[:whole]):
            if block != SCRATCH and block not in self._by_block:
                own = tuple(tokens[i * size : (i + 1) * size])
                self._put(Entry(block, own, owner + chain.namespace(i), chain.parent(i), None))
                self._aside.setdefault(owner, []).append(block)

    def forget_aside(self, owner: bytes) -> list[int]:
        """Let no block be found any longer that `owner` has set aside; return these blocks.

        Those that were published meanwhile stay, and those that were given out are another's.
        """
        aside = self._aside.pop(owner, ())
        entries = [self._by_block.get(block) for block in aside]
        blocks = [entry.block for entry in entries if entry is not None and entry.namespace.startswith(owner)]
        self.drop(blocks)
        return blocks

    def entry(self, block: int) -> Entry | None:
        """Return what a block holds; None when it cannot be found."""
        return self._by_block.get(block)

    def found(self, key: bytes | None) -> Entry | None:
        """Return the entry of the full block with this key; None when none can be found."""
        return None if key is None else self._by_key.get(key)

    def entries(self) -> list[Entry]:
        """Return the entries of all whole blocks that can be found."""
        return list(self._by_key.values())

    def drop(self, blocks: Iterable[int]) -> None:
        """Let these blocks be found no longer. Blocks that cannot be found anyway are ignored."""
        for block in blocks:
            if block in self._by_block:
                self._remove(block)
                self._pool.forget(block)

    def clear(self) -> None:
        """Let no block be found any longer."""
        self.drop(list(self._by_block))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert {e.key for e in self._by_block.values() if e.key} == self._by_key.keys(), "keys and blocks differ"
        assert all(self._by_block[e.block] is e for e in self._by_key.values())
        blocks: list[int] = []
        for branch, entries in self._behind.items():
            assert entries, "an empty branch"
            tokens = [e.tokens for e in entries]
            assert len(tokens) == 1 or tokens == sorted(set(tokens)), "a branch holds one thing twice"
            for e in entries:
                assert (e.namespace, e.parent) == branch
                blocks.append(e.block)
        assert sorted(blocks) == sorted(self._by_block), "the tree and the blocks differ"
        assert self._pool.kept() == self._by_block.keys(), "the pool keeps other blocks than are found"

    def _has_key(self, block: int) -> bool:
        """Return whether everybody may find a block, and it is full."""
        entry = self._by_block.get(block)
        return entry is not None and entry.key is not None

    def _put(self, entry: Entry) -> None:
        """Add an entry unless another block that is read has the same content."""
        entries = self._behind.get((entry.namespace, entry.parent), [])
        at = bisect_left(entries, entry.tokens, key=_TOKENS)
        there = entries[at] if at < len(entries) and entries[at].tokens == entry.tokens else None
        if there is not None:
            if there.block == entry.block or self._pool.count[there.block]:
                return
            self.drop((there.block,))
        if entry.block in self._by_block:  # it has more tokens now
            self._remove(entry.block)
        else:
            self._pool.keep(entry.block)
        entries = self._behind.setdefault((entry.namespace, entry.parent), [])
        entries.insert(bisect_left(entries, entry.tokens, key=_TOKENS), entry)
        self._by_block[entry.block] = entry
        if entry.key is not None:
            self._by_key[entry.key] = entry
            self.on_fill(entry)

    def _remove(self, block: int) -> None:
        entry = self._by_block.pop(block)
        if entry.key is not None:
            del self._by_key[entry.key]
        entries = self._behind[entry.namespace, entry.parent]
        del entries[bisect_left(entries, entry.tokens, key=_TOKENS)]
        if not entries:
            del self._behind[entry.namespace, entry.parent]

    def _on_evict(self, block: int) -> None:
        entry = self._by_block[block]
        self._remove(block)
        self._evictions += 1
        if entry.key is not None:
            self.on_evict(entry)

    def _most_alike(self, behind: tuple[bytes, bytes], tokens: tuple[int, ...]) -> Entry | None:
        """Return the entry after the block `behind` that shares most tokens with `tokens`.

        In the sorted list, it is a neighbour of the place of `tokens`.
        """
        entries = self._behind.get(behind, [])
        at = bisect_left(entries, tokens, key=_TOKENS)
        neighbours = entries[max(at - 1, 0) : at + 1]
        return max(neighbours, key=lambda e: _shared(e.tokens, tokens), default=None)


def find(caches: Sequence[PrefixCache], chain: Chain, tokens: Sequence[int], owner: bytes = b"") -> Match:
    """Return the longest prefix of `tokens` that all the caches of one model have, also as blocks that `owner` has set
    aside.

    A cache whose group gives blocks back may have a prefix and lack a shorter one, so it is asked again when another
    cache has less.
    """
    most = len(tokens) // caches[0].block_size
    tables: list[list[int] | None] = [None for _ in caches]
    at = agreeing = 0
    while agreeing < len(caches):
        longer = tables[at] if caches[at].group.keeps_all else None
        table = tables[at] = caches[at].whole(chain, tokens, most, owner) if longer is None else longer[:most]
        agreeing = agreeing + 1 if len(table) == most else 1
        most = len(table)
        at = (at + 1) % len(caches)
    parts = [cache.part(chain, tokens, most) for cache in caches]
    return Match([table or [] for table in tables], [block for block, _ in parts], min(extra for _, extra in parts))


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens agree from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

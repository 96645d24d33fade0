"""A runner without a device: its cache holds what was written, its next token is a hash of what it reads back.

It may have layers that see a window of positions, beside others or alone: then it reads their blocks, too.

Where a real model would smooth a scheduling mistake over, this one answers with another token or raises. It keeps the
contract of `engine/plan.py` strictly: what a plan may not do is an assertion here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import structs

from mlx_tandem.engine.plan import (
    CARRY,
    NOT_A_NUMBER,
    DeviceError,
    Mask,
    Row,
    RowKind,
    Seating,
    StepPlan,
    StepResult,
    scored_positions,
)
from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.groups.state import StateGroup
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import SCRATCH, BlockPool, Window
from mlx_tandem.types import SamplingParams, TokenLogprob
from tests.engine.toy_model import (
    BASE,
    NAN,
    NOTHING,
    STATE,
    Windows,
    bytes_of,
    cell,
    cells_of,
    hidden_of,
    logprob_of,
    next_token,
    score_of,
    state_after,
)


@dataclass(slots=True)
class _Seat:
    params: SamplingParams
    choice: int
    prompt_length: int
    stop_ids: frozenset[int]
    history: list[int]
    sequence: int | None = None  # the first row says whose it is
    last: int | None = None  # sampled since it was seated
    drafts: int = 0  # of its last row


@dataclass(slots=True)
class Handle:
    result: StepResult
    raises: bool
    number: int
    contexts: dict[int, list[int | None]]  # the cells that each row that sampled read first, by its index
    plan: StepPlan
    bad: int | None  # the row that is not finite
    sampled: bool
    rows: list[Row]  # of the plan, each at the place where it begins


@dataclass(slots=True)
class ReferenceRunner:
    """Executes each plan at its launch, in order, and shows the outcome in `wait`.

    `fail` maps the number of a launch to where it raises: "launch" before anything was done, "half" in the launch
    with half of the rows written, "wait" when its result is read. `nan` maps the number of a launch to the index,
    modulo the rows that sample, of the row whose logits are not finite. `num_slots` counts adapters beside the base.
    `windows`: of the layers in each group, which has as many blocks as `sizes` says.
    """

    num_blocks: int
    block_size: int
    num_seats: int
    num_slots: int
    vocab: int
    fail: Mapping[int, Literal["launch", "half", "wait"]] = field(default_factory=dict)
    again: frozenset[int] = frozenset()  # those of `fail` after which the rows can be computed again
    nan: Mapping[int, int] = field(default_factory=dict)
    may_wait: bool = False  # in launches, that is
    one_at_a_time: bool = False
    drafting_positions: int = 0
    known: frozenset[str] | None = None  # digests that can be uploaded; None: all
    windows: Windows = (None,)
    window_blocks: int = 0
    state_blocks: int = 0

    launches: int = 0
    positions: int = 0  # written since start
    uploads: int = 0
    loads: int = 0
    given_back: int = 0  # blocks before the windows of rows, counted for each row
    spoiled: int = 0  # rows that were not finite because of what somebody else had left behind their mask
    masked: int = 0  # rows that drew by masks
    drafted: int = 0  # tokens in VERIFY rows behind the first
    accepted: int = 0  # of these
    floated: int = 0  # rows that began where only the device knew
    infected: int = 0  # rows that read what was not finite and was another sequence's
    broken: bool = False
    awaits_plan: bool = False  # whether a next step may have been dispatched that waits for its plan on the device
    freed: set[int] = field(default_factory=set)  # blocks that the pool got back since the last launch
    _waited: int = 0
    _ill: set[int] = field(default_factory=set)  # sequences with a row that was not finite
    _cells: list[list[int | None]] = field(init=False)  # None: poison
    _states: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # of a seat's row of this launch, by group
    _written: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # the blocks that these are in
    _owners: list[int] = field(init=False)  # the group of each block
    _scratches: tuple[int, ...] = field(init=False)
    _slots: dict[int, str] = field(init=False)
    _seats: dict[int, _Seat] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = {0: BASE}
        self._owners = [i for i, size in enumerate(self.sizes) for _ in range(size)]
        self._scratches = tuple(self.first(i) for i in range(len(self.windows)))
        self._wipe()

    def _wipe(self) -> None:
        each = zip(self.windows, self.sizes, strict=True)
        self._cells = [[None] * (1 if w == STATE else self.block_size) for w, n in each for _ in range(n)]
        self._seats = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Blocks of each group."""
        return (self.num_blocks, *(self.state_blocks if w == STATE else self.window_blocks for w in self.windows[1:]))

    def first(self, group: int) -> int:
        """Return the number of a group's first block, its scratch."""
        return sum(self.sizes[:group])

    def _group_of(self, block: int) -> int:
        return self._owners[block]

    # the Runner protocol

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Handle:
        self.awaits_plan = False
        if not plan.has_step:
            assert self._waited == self.launches, "steps are in flight"
            return Handle(StepResult([]), False, -1, {}, plan, None, True, [])
        assert not self.broken, "launched after a failure without a reset"
        number, self.launches = self.launches, self.launches + 1
        failure = self.fail.get(number)
        if failure == "launch":
            self._break(number)
        saves = [bytes_of(self._cells[b]) for b in plan.saves]
        for slot, digest in plan.uploads:
            assert 1 <= slot <= self.num_slots, f"there is no slot {slot}"
            if self.known is not None and digest not in self.known:
                self._break(number)
            self._slots[slot] = digest
            self.uploads += 1
        self._copy(plan.copies)
        self._load(plan)
        for seating in plan.seatings:
            self._take(seating)
        every = [self._placed(row) for row in plan.rows]
        rows = every[: len(every) // 2] if failure == "half" else every
        self._states, self._written = {}, {}
        self._write(rows)
        if failure == "half":
            self._break(number)
        if on_built is not None:
            on_built()
        samplers = [i for i, row in enumerate(plan.rows) if row.sample]
        longest = max((row.start + len(row.tokens) for row in plan.rows), default=0)
        assert not plan.drafts or 2 * len(plan.rows) * longest <= self.drafting_positions, "too much for one step"
        bad = samplers[self.nan[number] % len(samplers)] if number in self.nan and samplers else None
        for row in rows:
            self._look_back(row)
        contexts = {i: self._read(every[i], 0) for i in samplers if self.windows[0] != STATE}
        drawn: list[tuple[int, ...]] = [()] * len(plan.rows)
        for i in samplers:
            if plan.drafts:
                drawn[i] = self._draft(every[i], plan.drafts, i == bad)
            elif i not in plan.masked:
                drawn[i] = self._draw(every[i], i == bad)
        scores = {i: self._score(row) for i, row in enumerate(plan.rows) if row.targets}
        scored = sum(len(plan.rows[i].tokens) for i in scores)
        assert scored <= scored_positions(self.vocab), f"{scored} positions are scored in one step"
        pooled = {i: self._pool(row) for i, row in enumerate(plan.rows) if row.pooling is not None}
        result = StepResult(drawn, self._logprobs(plan.rows, drawn), scores, saves, pooled=pooled)
        assert set(plan.masked) <= set(samplers), "a mask for a row that draws nothing"
        return Handle(result, failure == "wait", number, contexts, plan, bad, not plan.masked, every)

    def place(self, masks: list[list[Mask]]) -> list[list[Mask]]:
        return masks

    def sample(self, handle: Handle, masks: list[list[Mask]]) -> None:
        assert not self.broken, "sampled after a failure without a reset"
        assert handle.number == self.launches - 1 and not handle.sampled, "masks come once, before the next launch"
        for i, own in zip(handle.plan.masked, masks, strict=True):
            handle.result.tokens[i] = self._draw(handle.rows[i], i == handle.bad, own)
        handle.result.logprobs[:] = self._logprobs(handle.plan.rows, handle.result.tokens)
        handle.sampled = True
        self.masked += len(masks)

    def drawn(self, handle: Handle) -> list[tuple[int, ...]]:
        assert handle.sampled, "rows wait for their masks"
        return list(handle.result.tokens)

    def launch_waits(self, plan: StepPlan) -> bool:
        """For some plans, by their contents."""
        return self.may_wait and sum(len(row.tokens) for row in plan.rows) % 3 == 0

    def wait(self, handle: Handle) -> StepResult:
        assert not self.broken, "waited after a failure without a reset"
        assert handle.sampled, "rows wait for their masks"
        assert handle.number >= self._waited, "steps are read in the order of their launch, each once"
        self._waited = handle.number + 1
        if handle.raises:
            self._break(handle.number)
        self.awaits_plan = self._waited == self.launches
        return handle.result

    def reset(self) -> None:
        """Nothing in the cache or the seats survives here; adapters do."""
        self.broken = False
        self._waited = self.launches
        self._wipe()

    # the machine

    def _break(self, number: int) -> None:
        self.broken = True
        raise DeviceError(f"injected into step {number}", again=number in self.again)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        targets = [b for _, b in copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert not set(targets) & set(self._scratches), "a copy into the scratch block"
        assert all(self._group_of(a) == self._group_of(b) for a, b in copies), "a copy into another group"
        held = [list(self._cells[a]) for a, _ in copies]  # all reads before all writes
        for b in self.freed:
            # What is not finite stays so until somebody writes over it.
            self._cells[b] = [c if c == NAN else None for c in self._cells[b]]
        self.freed.clear()
        for (_, b), content in zip(copies, held, strict=True):
            self._cells[b] = content

    def _load(self, plan: StepPlan) -> None:
        targets = [b for b, _ in plan.loads]
        assert len(set(targets)) == len(targets), "two loads into one block"
        assert SCRATCH not in targets, "a load into the scratch block"
        assert not {a for a, b in plan.copies if a not in self._scratches and b in targets}, "a load over a copy"
        for block, content in plan.loads:
            cells = cells_of(content)
            assert len(cells) == len(self._cells[block]), "not a block's bytes"
            self._cells[block] = list(cells)
            self.loads += 1

    def _take(self, seating: Seating) -> None:
        assert 0 <= seating.seat < self.num_seats, f"there is no seat {seating.seat}"
        assert 0 < seating.prompt_length <= len(seating.history)
        self._seats[seating.seat] = _Seat(
            seating.params, seating.choice, seating.prompt_length, seating.stop_ids, list(seating.history)
        )

    def _placed(self, row: Row) -> Row:
        """Return a row at the place where it begins, with the token that it carries: its seat knows both."""
        seat = self._seats[row.seat]
        if row.slack:
            assert row.tokens[0] == CARRY
            assert row.slack == seat.drafts, "a row floats that does not follow drafts"
            place = len(seat.history) - 1
            assert 0 <= row.start - place <= row.slack, "a row begins where it cannot"
            self.floated += 1
            row = structs.replace(row, start=place)
        if row.kind is RowKind.VERIFY and row.tokens[0] == CARRY:
            assert seat.last is not None, "nothing was drawn in this seat that could be carried"
            row = structs.replace(row, tokens=(seat.last, *row.tokens[1:]))
        seat.drafts = len(row.tokens) - 1 if row.kind is RowKind.VERIFY else 0
        return row

    def _write(self, rows: Sequence[Row]) -> None:
        """All rows write before any reads, as in a layer of a device."""
        written: set[tuple[int, int]] = set()
        tokens = [self._tokens(row) for row in rows]
        assert len({row.seat for row in rows}) == len(rows), "two rows of one seat"
        for row, own in zip(rows, tokens, strict=True):
            assert row.start >= 0 and own, "an empty row"
            assert len(row.tables) == len(self.windows), "a table for each pool"
            digest = self._slots[row.lora_slot]
            for pool, table in enumerate(row.tables):
                if self.windows[pool] == STATE:
                    self._write_states(row, pool, [cell(token, digest) for token in own], written)
                    continue
                assert row.start + len(own) <= len(table) * self.block_size, "a row ends beyond its blocks"
                for at, token in enumerate(own, row.start):
                    assert 0 <= token < self.vocab, f"token {token} is not in the vocabulary"
                    place = table[at // self.block_size], at % self.block_size
                    assert self._group_of(place[0]) == pool, "a block of another group"
                    assert place[0] not in self._scratches, "a row writes into the scratch block"
                    assert place not in written, "two rows write one position"
                    written.add(place)
                    self._cells[place[0]][place[1]] = cell(token, digest)
            self.positions += len(own)

    def _write_states(self, row: Row, group: int, cells: Sequence[int], written: set[tuple[int, int]]) -> None:
        """Take the state before a row's first position through its tokens; it is kept behind the last token. A row with
        drafts keeps states when it has drawn."""
        table, size = row.tables[group], self.block_size
        state: int | None = NOTHING
        if row.start:
            source = table[(row.start - 1) // size]
            assert source not in self._scratches, "a state that was given back is read"
            assert (source, 0) not in written or row.kind is RowKind.PROMPT, "a state is read that another row writes"
            (state,) = self._cells[source]
        states: list[int] = []
        for n, own in enumerate(cells):
            assert state is not None, f"the state behind position {row.start + n - 1} is not (or no longer) written"
            states.append(state)
            state = state_after(state, own)
        assert state is not None
        states.append(state)
        first, last = row.start // size, (row.start + len(cells) - 1) // size
        verifies = row.kind is RowKind.VERIFY
        assert first == last or row.start % size == 0 or verifies, "a row goes beyond the block that it begins within"
        blocks = list(table[first : last + 1]) if verifies else [table[last]]
        assert len(blocks) == last - first + 1 or not verifies, "a row ends beyond its blocks"
        for block in blocks:
            assert self._group_of(block) == group, "a block of another group"
            assert block not in self._scratches, "a state is written into the scratch block"
            assert (block, 0) not in written, "two rows write one state"
            written.add((block, 0))
        if not verifies:
            self._cells[blocks[0]] = [state]
        self._states[row.seat, group] = states
        self._written[row.seat, group] = blocks

    def _keep_states(self, row: Row, accepted: int) -> None:
        """Keep the state behind the last of so many tokens of a row with drafts, and at each end of a block before."""
        size, end = self.block_size, row.start + accepted
        for group in (i for i, window in enumerate(self.windows) if window == STATE):
            for at, block in enumerate(self._written[row.seat, group], row.start // size):
                if at * size < end:
                    self._cells[block] = [self._states[row.seat, group][min((at + 1) * size, end) - row.start]]

    def _tokens(self, row: Row) -> tuple[int, ...]:
        assert row.seat in self._seats, f"seat {row.seat} was never taken"
        seat = self._seats[row.seat]
        assert seat.sequence in (None, row.sequence), "a row in another sequence's seat"
        seat.sequence = row.sequence
        assert row.sample or row.kind is RowKind.PROMPT, "a row that decodes draws nothing"
        if row.kind is RowKind.VERIFY:
            assert len(row.tokens) > 1, "a row without drafts is verified"
            assert seat.history[row.start :] == [row.tokens[0]], "drafts stand behind another token than the newest"
        elif row.kind is RowKind.DECODE:
            assert len(row.tokens) == 1, "a row that decodes has several tokens"
        if CARRY not in row.tokens:
            return row.tokens
        assert row.kind is RowKind.DECODE and row.tokens == (CARRY,), "only a decode carries"
        assert seat.last is not None, "nothing was drawn in this seat that could be carried"
        return (seat.last,)

    def _draw(self, row: Row, not_finite: bool, masks: Sequence[Mask] = ()) -> tuple[int, ...]:
        """Return the tokens that a row draws: after its last position, or after each of a VERIFY row's up to the first
        draft that is another than was drawn."""
        seat = self._seats[row.seat]
        end = row.start + len(row.tokens)
        cells = [self._read(row, i) for i, w in enumerate(self.windows) if w != STATE]
        states = [self._states[row.seat, i] for i, w in enumerate(self.windows) if w == STATE]
        self.infected += any(NAN in own[:1] for own in states) and row.sequence not in self._ill
        self.spoiled += any(NAN in own[end:] for own in cells)
        self.infected += any(NAN in own[: row.start] for own in cells) and row.sequence not in self._ill
        forbidden = any(not any(mask) for mask in masks)  # no logit is left, as on a device
        not_finite = not_finite or forbidden or any(NAN in own for own in (*cells, *states))
        if not_finite:
            self._ill.add(row.sequence)
            for group, table in enumerate(row.tables):
                for block in self._written.get((row.seat, group), ()):
                    self._cells[block] = [NAN]
                for at in range(row.start, end) if self.windows[group] != STATE else ():
                    self._cells[table[at // self.block_size]][at % self.block_size] = NAN
        if not_finite:
            seat.last = 0
            seat.history.append(0)
            return (NOT_A_NUMBER,)
        drawn: list[int] = []
        ends = range(row.start + 1 if row.kind is RowKind.VERIFY else end, end + 1)
        assert not masks or len(masks) == len(ends), "a mask for each position that draws"
        for at in ends:
            banned = seat.stop_ids if at < seat.prompt_length + seat.params.min_tokens else ()
            mask = masks[at - ends[0]] if masks else None
            context = self._seen(row, at)
            drawn.append(next_token(context, seat.params, seat.choice, seat.history, self.vocab, banned, mask))
            seat.history.append(drawn[-1])
            if at < end and row.tokens[at - row.start] != drawn[-1]:
                break
        seat.last = drawn[-1]
        if row.kind is RowKind.VERIFY:
            self._keep_states(row, len(drawn))
        self.accepted += len(drawn) - 1
        self.drafted += len(row.tokens) - 1 if row.kind is RowKind.VERIFY else 0
        return tuple(drawn)

    def _draft(self, row: Row, number: int, not_finite: bool) -> tuple[int, ...]:
        """Return so many tokens, each drawn after the one before it. They leave nothing behind."""
        assert row.kind is RowKind.PROMPT and STATE not in self.windows, "a row that cannot draw several tokens"
        seat, digest, end = self._seats[row.seat], self._slots[row.lora_slot], row.start + len(row.tokens)
        cells = [self._read(row, i)[:end] for i in range(len(self.windows))]
        self.infected += any(NAN in own[: row.start] for own in cells) and row.sequence not in self._ill
        if not_finite or any(NAN in own for own in cells):
            return (NOT_A_NUMBER,) * number
        drawn: list[int] = []
        assert len(seat.history) == end or not seat.params.counts_tokens, "the counts are not those of the row's tokens"
        history = (seat.history + [0] * end)[:end]  # of which only the length matters then
        for at in range(end, end + number):
            banned = seat.stop_ids if at < seat.prompt_length + seat.params.min_tokens else ()
            context: list[Any] = []
            for window, known in zip(self.windows, cells, strict=True):
                context += known[0 if window is None else max(at - window, 0) :]
            drawn.append(next_token(context, seat.params, seat.choice, history, self.vocab, banned))
            history.append(drawn[-1])
            for known in cells:
                known.append(cell(drawn[-1], digest))
        return tuple(drawn)

    def _pool(self, row: Row) -> list[float]:
        ends = range(row.start + 1, row.start + len(row.tokens) + 1)
        hidden = [hidden_of(self._seen(row, end)) for end in ends]
        return [sum(values) for values in zip(*hidden, strict=True)] if row.pooling == "mean" else hidden[-1]

    def _score(self, row: Row) -> list[TokenLogprob]:
        seat = self._seats[row.seat]
        end = min(row.start + len(row.tokens) + 1, seat.prompt_length)
        assert row.targets == tuple(seat.history[row.start + 1 : end]), "these are not the prompt's next tokens"
        return [
            score_of(self._seen(row, at), token, seat.params) for at, token in enumerate(row.targets, row.start + 1)
        ]

    def _read(self, row: Row, pool: int) -> list[int | None]:
        """The cells by position, as a device reads them to compute `row`: from the first block on that its first query
        sees (None stands for what comes before that) to the end of the last, however little of it is written."""
        table, window, size = row.tables[pool], self.windows[pool], self.block_size
        sees = 0 if window is None else max(row.start + 1 - window, 0)
        end = row.start + len(row.tokens)
        self.given_back += table[: sees // size].count(SCRATCH)
        cells: list[int | None] = [None] * (sees // size * size)
        for block in table[sees // size : -(-end // size)]:
            assert block not in self._scratches, "a block that was given back is read"
            cells += self._cells[block]
        read = cells[sees:end]
        assert None not in read, f"position {sees + read.index(None)} was read and is not (or no longer) written"
        return cells

    def _seen(self, row: Row, end: int) -> list[int]:
        """What the layers see at the last position before `end`."""
        context: list[int | None] = []
        for group, window in enumerate(self.windows):
            if window == STATE:
                context.append(self._states[row.seat, group][end - row.start])
            else:
                context += self._read(row, group)[0 if window is None else max(end - window, 0) : end]
        return context  # type: ignore[return-value]

    def _look_back(self, row: Row) -> None:
        """What a window shows of a sequence is its own, also to rows that draw nothing."""
        history = self._seats[row.seat].history
        for pool in range(len(self.windows)):
            if self.windows[pool]:
                known = zip(self._read(row, pool)[: row.start], history, strict=False)
                assert all(c in (None, NAN) or c & 0xFFFFF == t for c, t in known), "another's cell"

    def _logprobs(self, rows: Sequence[Row], drawn: Sequence[tuple[int, ...]]) -> list[tuple[TokenLogprob, ...] | None]:
        wanted = [self._seats[row.seat].params for row in rows]
        if not any(tokens and p.logprobs is not None for tokens, p in zip(drawn, wanted, strict=True)):
            return []
        return [
            tuple(logprob_of(t, p) for t in tokens) if tokens and p.logprobs is not None else None
            for tokens, p in zip(drawn, wanted, strict=True)
        ]


class WrappedRunner:
    """A reference runner behind another one, which changes or notes some of the calls."""

    def __init__(self, inner: ReferenceRunner):
        self.inner = inner

    @property
    def one_at_a_time(self) -> bool:
        return self.inner.one_at_a_time

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Any:
        return self.inner.launch(plan, on_built)

    def launch_waits(self, plan: StepPlan) -> bool:
        return self.inner.launch_waits(plan)

    def place(self, masks: list[list[Mask]]) -> Any:
        return self.inner.place(masks)

    def sample(self, handle: Any, masks: Any) -> None:
        self.inner.sample(handle, masks)

    def drawn(self, handle: Any) -> list[tuple[int, ...]]:
        return self.inner.drawn(handle)

    def wait(self, handle: Any) -> StepResult:
        return self.inner.wait(handle)

    def reset(self) -> None:
        self.inner.reset()


class WatchedPool(BlockPool):
    """One of the runner's pools. Tells it which blocks are free, so that they are poison from the next launch on."""

    def __init__(self, runner: ReferenceRunner, group: int = 0):
        super().__init__(runner.sizes[group], runner.block_size, first=runner.first(group))
        self._runner = runner

    def _vacate(self, block: int) -> None:
        super()._vacate(block)
        self._runner.freed.add(block)


def open_groups(runner: ReferenceRunner, row: int) -> list[CacheGroup]:
    """Return the groups of the runner's layers. `row`: the most tokens of a row."""
    groups: list[CacheGroup] = []
    for i, window in enumerate(runner.windows):
        pool = WatchedPool(runner, i)
        if window is None:
            groups.append(AttentionGroup(pool, 8 * runner.block_size))
        elif window == STATE:
            groups.append(StateGroup(pool, 8))
        else:
            groups.append(WindowGroup(pool, Window(window, row), 8 * runner.block_size))
    return groups

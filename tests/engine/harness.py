"""The engine's core without its channel: a scheduler and a runner turned step by step, with every rule watched."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Several
from typing import Any

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.engine.plan import DeviceError, Mask, RowKind, Runner, StepPlan
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.types import AdapterRef, Delta, FinishReason, Request, TokenLogprob
from tests.engine.reference import Handle
from tests.engine.toy_model import BASE, begins_in, cell, cells_of_tokens

Choice = tuple[int, int]  # request id, index


class Loop:
    """Plans, launches and reads. At depth 1 a plan is made and launched before the one before it is read.

    Asserts as it goes: the scheduler's invariants hold after each step, nothing is said of what is over, each choice
    ends once, and work that exists is worked on.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, pool: BlockPool, slots: SlotTable, *, depth: int):
        self.scheduler = scheduler
        self.runner = runner
        self.pool = pool
        self.slots = slots
        self.depth = depth
        self.requests: dict[int, Request] = {}
        self.versions: dict[Choice, list[int]] = {}  # of requests that follow, a token each
        self.moved: set[int] = set()  # requests that went on under another version
        self._followed: dict[int, AdapterRef] = {}  # request -> the version that it goes on under
        self._refs: dict[tuple[str, int], AdapterRef] = {}
        self.tokens: dict[Choice, list[int]] = {}
        self.logprobs: dict[Choice, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self.embeddings: dict[int, bytes] = {}
        self.cached: dict[int, int] = {}  # tokens of the prompt that were there, as deltas say
        self._begun: dict[int, int] = {}  # request -> where its first row started
        self.finished: dict[Choice, FinishReason] = {}
        self.failed: set[int] = set()
        self.cancelled: set[Choice] = set()
        self.admitted: dict[int, int] = {}  # request -> how many ran before it
        self.started: dict[int, float] = {}  # request -> when its first row was planned, as the scheduler says
        self.preempted: Counter[int] = Counter()  # request -> how often the scheduler said so
        self.steps = 0
        self.failures = 0
        self.accepted = 0  # drafts
        self.floated = 0  # rows that began where only the device knew
        self.piggybacked = 0  # chunks of prompts that went with rows that decode
        self.waits = 0  # turns in which nothing could be done but wait for the drive
        self._flights: deque[tuple[StepPlan, Any]] = deque()
        self._undrawn = False  # whether the newest of them waits for masks
        self._early: list[Any] = []  # what `place` returned for it before the step before was read
        self.early = 0  # plans with such masks

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.id] = request
        for choice in range(request.n):
            self.tokens[request.id, choice] = []
            self.logprobs[request.id, choice] = []
            self.versions[request.id, choice] = []
        if request.adapter is not None:
            self._know(request.adapter)

    def follow(self, ref: AdapterRef) -> None:
        """A new version of a name, for whoever follows it."""
        self._know(ref)
        moved = self.scheduler.follow(ref)
        followers = {r for r in self.scheduler.requests if self._goes_on_under(r, ref)}
        assert set(moved) == followers, "another request follows than those that asked to"
        self.moved |= followers
        self._followed |= dict.fromkeys(followers, ref)
        self.scheduler.check()

    def _goes_on_under(self, request: int, ref: AdapterRef) -> bool:
        asked = self.requests[request]
        now = self._followed.get(request, asked.adapter)
        return asked.follow and now is not None and now.name == ref.name and now != ref

    def _know(self, ref: AdapterRef) -> None:
        assert self._refs.setdefault((ref.name, ref.version), ref) == ref, "versions are immutable"

    def cancel(self, request: int, choice: int | None = None) -> None:
        """As the core does; what had ended before stays ended."""
        for key in self.open_choices():
            if key[0] == request and choice in (None, key[1]):
                self.cancelled.add(key)
        self.scheduler.cancel(request, choice, keep=True)
        self.scheduler.check()

    def open_choices(self) -> list[Choice]:
        return [
            key
            for key in self.tokens
            if key not in self.finished and key[0] not in self.failed and key not in self.cancelled
        ]

    def step(self, background: bool = True) -> bool:
        """One turn; False when there was nothing to do."""
        before = list(self.scheduler.queue.running)
        users = {s.request.id for s in self.scheduler._sequences.values() if not s.request.background}
        if not self._sample():
            return True
        plan = self.scheduler.plan(background)
        if plan is not None and users and not background:
            assert not any(row.background for row in plan.rows), "rows made for training run that were left out"
        self._look_at_events(plan)
        self._look_at_running(before)
        for s in self.scheduler.queue.running:
            self.admitted.setdefault(s.request.id, len(self.admitted))
        if plan is None and not self._flights:
            offload = self.scheduler.offload
            waits = offload is not None and (offload.reads.is_reading or offload.saves.is_saving)
            waits = waits or self._waits_for_masks
            assert waits or not self.scheduler.requests, "there is work and no plan for it"
            self.waits += waits
            assert self.waits <= 2000, "the drive or a mask is waited for without an end"
            self.scheduler.check()
            return waits
        plans = [p for p, _ in self._flights] + ([plan] if plan is not None else [])
        try:
            if plan is not None:
                self._look_at(plan)
                self._flights.append((plan, self._launch(plan)))
                self._undrawn = bool(plan.masked)
            if len(self._flights) > self.depth or plan is None:
                self._read()
        except DeviceError as e:
            self._fail(plans, e.again)
        self.steps += 1
        self.scheduler.check()
        self.slots.check()
        waiting = [(s.priority, s.request.id not in self.admitted) for s in self.scheduler.queue.waiting]
        assert waiting == sorted(waiting), "whoever has run before comes first among equals"
        return True

    def run(self, most: int = 10_000) -> Loop:
        while self.step():
            assert self.steps <= most, f"not done after {most} steps"
        return self

    def assert_idle(self) -> None:
        """Everything has ended, once, and nothing is held."""
        assert not self.open_choices(), f"never ended: {self.open_choices()}"
        assert not list(self.scheduler.requests)
        assert self.scheduler.queue.num_running == self.scheduler.queue.num_waiting == 0
        for group in self.scheduler._blocks.groups:
            assert group.pool.used_blocks == 0, "blocks leak"
            group.pool.check([])
        self._look_at_events(None)
        said = sum(map(len, self.tokens.values()))
        assert self.scheduler.generated_tokens == said, "another number of tokens is counted than was said"
        assert self.preempted.total() == self.scheduler.queue.preemptions, "a preemption is not told, or told twice"
        assert self.started.keys() <= self.requests.keys()
        offload = self.scheduler.offload
        assert offload is None or not (offload.reads.is_reading or offload.saves._flights), (
            "something waits for the drive"
        )
        self.scheduler.check()
        assert not any(self.slots.references(d) for d in self.slots.residents()), "an adapter slot leaks"

    def _look_at(self, plan: StepPlan) -> None:
        assert plan.has_step, "an empty plan"
        self.piggybacked += sum(row.piggybacked for row in plan.rows)
        if any(row.piggybacked for row in plan.rows):
            assert any(row.kind is not RowKind.PROMPT for row in plan.rows), "nobody decodes beside a prompt"
        assert len({row.sequence for row in plan.rows}) == len(plan.rows), "a sequence has two rows"
        drafts = {r.sequence: len(r.tokens) - 1 for p, _ in self._flights for r in p.rows if r.kind is RowKind.VERIFY}
        self.floated += sum(row.slack > 0 for row in plan.rows)
        for row in plan.rows:
            assert row.slack == drafts.get(row.sequence, 0), "a row does not say how many drafts it stands behind"
        for row in plan.rows:
            self._begun.setdefault(self.scheduler._sequences[row.sequence].request.id, row.start)
        most = self.scheduler._config.prefill_batch_size
        assert not most or sum(row.kind is RowKind.PROMPT for row in plan.rows) <= most, "too many prompts in one step"

    def _look_at_events(self, plan: StepPlan | None) -> None:
        """A request is said to start once, with its first row and not before an earlier one."""
        started, preempted = self.scheduler.take_events()
        self.preempted.update(preempted)
        for request, at in started:
            assert request not in self.started, "a request starts twice"
            assert at >= max(self.started.values(), default=0.0), "time runs backwards"
            self.started[request] = at
        for row in () if plan is None else plan.rows:
            request = self.scheduler._sequences[row.sequence].request.id
            assert request in self.started, "a request has a row and was not said to start"

    def _look_at_running(self, before: list[Sequence]) -> None:
        running = self.scheduler.queue.running
        parked = self.scheduler.queue.parked
        preempted = [s.priority for s in before if s not in running and s.seat < 0 and s.id not in parked]
        kept = [s.priority for s in before if s in running]
        assert not preempted or not kept or max(kept) <= min(preempted), "one that mattered more was preempted"
        everyone = [x for s in running for x in (s, *s.siblings)]
        left = {x.id for x in everyone if (x.request.id, x.choice) in self.cancelled}  # they stay for one token
        most_of = {x.id: len(x.request.prompt) + x.request.params.max_tokens for x in everyone}
        tokens = sum(x.most_tokens if x.id in left else most_of[x.id] for x in everyone)
        most = self.scheduler._config.max_inflight_tokens
        assert not most or tokens <= most or len({x.request.id for x in everyone}) == 1, "too many tokens in flight"

    @property
    def _waits_for_masks(self) -> bool:
        slow = [s for s in self.scheduler._sequences.values() if self.scheduler._late.is_slow(s)]
        return bool(slow or self.scheduler.queue.parked)

    def _masks_before_reading(self, plan: StepPlan) -> list[list[Mask]] | None:
        """As the pipeline's other thread makes them, for every second plan; None for masks that are made later."""
        if not plan.masked or len(self._flights) != 1 or self.runner.one_at_a_time or self.steps % 2:
            return None
        before, handle = self._flights[0]
        drawn = zip(before.rows, self.runner.drawn(handle), strict=True)
        self.early += 1
        return self.scheduler.masks(plan, {row.sequence: tokens for row, tokens in drawn if tokens})

    def _launch(self, plan: StepPlan) -> Any:
        masks = self._masks_before_reading(plan)
        self._early.clear()
        if masks is None:
            return self.runner.launch(plan)
        return self.runner.launch(plan, lambda: self._early.append(self.runner.place(masks)))

    def _sample(self) -> bool:
        """Let the newest step draw by masks, as soon as the step before it was read. False: the device failed."""
        if self._undrawn and len(self._flights) == 1:
            self._undrawn = False
            plan, handle = self._flights[-1]
            try:
                (masks,) = self._early or (self.runner.place(self.scheduler.masks(plan)),)
                self.runner.sample(handle, masks)
            except DeviceError as e:
                self._fail([plan], e.again)
                return False
        return True

    def _read(self) -> None:
        if len(self._flights) == 1 and not self._sample():
            return
        self.take(*self._flights.popleft())

    def take(self, plan: StepPlan, handle: Any) -> None:
        """Read a step that was launched and let the scheduler take in its result."""
        result = self.runner.wait(handle)
        alive = self.scheduler._sequences
        rows = {
            (s.request.id, s.choice): i for i, r in enumerate(plan.rows) if (s := alive.get(r.sequence)) is not None
        }
        self.accepted += sum(len(drawn) - 1 for drawn in result.tokens if drawn)
        outcome = self.scheduler.update_from_output(plan, result)
        for delta in outcome.deltas:
            key = delta.request, delta.choice
            self._look_at_version(delta, plan, handle, rows[key])
            assert key in self.tokens, "a delta of nobody"
            assert key not in self.finished, "a delta after the end"
            assert key not in self.cancelled, "a delta after a cancel"
            assert delta.request not in self.failed, "a delta after a failure"
            assert delta.tokens, "an empty delta"
            assert delta.cached == self._begun[delta.request], "another number of cached tokens than were"
            self.cached[delta.request] = delta.cached
            if delta.embedding:
                assert delta.request not in self.embeddings, "an embedding comes twice"
                self.embeddings[delta.request] = delta.embedding
            if delta.prompt_logprobs:
                spoken = [key for key, tokens in self.tokens.items() if key[0] == delta.request and tokens]
                assert not spoken, "a prompt's logprobs come after its first tokens"
                assert delta.request not in self.prompt_logprobs, "a prompt's logprobs come twice"
                self.prompt_logprobs[delta.request] = list(delta.prompt_logprobs)
            self.tokens[key] += delta.tokens
            self.logprobs[key] += delta.logprobs or ()
            if delta.finish:
                self.finished[key] = delta.finish
        self._take_failed([*outcome.failed, *outcome.unencoded])

    def _look_at_version(self, delta: Delta, plan: StepPlan, handle: Any, index: int) -> None:
        """The row that drew these tokens ran under the version that they name, over the keys and values of its own
        sequence, each computed under some version of the same adapter."""
        key, request, row = (delta.request, delta.choice), self.requests[delta.request], plan.rows[index]
        assert row.background == request.background
        self.versions[key].append(delta.version)
        if not request.follow or request.adapter is None:
            assert delta.version == 0, "a version of a request that follows nobody"
            return
        if not isinstance(handle, Handle):
            return
        if index not in handle.contexts:
            return
        row = handle.rows[index]
        name = request.adapter.name
        ref = self._refs[name, delta.version]
        known = [*request.prompt, *self.tokens[key]]
        context = handle.contexts[index][: len(known)]  # None before a window
        assert len(context) == len(known), "a token was drawn from less than its context"
        own = cells_of_tokens(known, ref.digest, begins_in(request.prompt, ref))
        assert context[row.start :] == own[row.start :], "another version's row"
        allowed = [r.digest for (n, _), r in self._refs.items() if n == name]
        allowed += [BASE] if any(r.invocation for (n, _), r in self._refs.items() if n == name) else []
        cells = ([None, *(cell(t, d) for d in allowed)] for t in known)
        assert all(c in each for c, each in zip(context, cells, strict=True)), "a foreign cell"

    def _fail(self, plans: Several[StepPlan], again: bool) -> None:
        self.failures += 1
        self._flights.clear()
        self._undrawn = False
        alive = self.scheduler._sequences
        open_ones = {request for request, _ in self.open_choices()}
        lost = {alive[r.sequence].request.id for plan in plans for r in plan.rows if r.sequence in alive} & open_ones
        failed = self.scheduler.fail(plans, again=again)
        assert set(failed) == (set() if again else lost), (
            "the requests with a row in the lost steps fail, and no others"
        )
        self._take_failed(failed)
        self.runner.reset()

    def _take_failed(self, requests: Several[int]) -> None:
        assert len(set(requests)) == len(requests), "a request fails twice"
        for request in requests:
            assert request not in self.failed, "a request fails twice"
            keys = [key for key in self.open_choices() if key[0] == request]
            assert keys, "a request fails that is over"
            self.failed.add(request)

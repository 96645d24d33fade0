"""The rule of `order.py` beside the machine that it is about."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.hazards.encoder import Encoders
from tests.hazards.order import Ordered

BUFFERS = st.sets(st.integers(0, 5), max_size=3)
WORK = st.lists(st.tuples(BUFFERS, BUFFERS, st.booleans()), max_size=12)  # inputs, outputs, the encoder ends behind it


def by_rule(work: list[tuple[set[int], set[int], bool]]) -> list[int]:
    ordered = Ordered()
    for inputs, outputs, _ in work:
        ordered.dispatch(inputs, outputs)
    return ordered.before


def by_machine(work: list[tuple[set[int], set[int], bool]], *, cut_everywhere: bool = False) -> list[int]:
    encoders = Encoders()
    for inputs, outputs, ends in work:
        encoders.dispatch(inputs, outputs)
        if ends or cut_everywhere:
            encoders.end()
    encoders.end()
    return encoders.before


@given(WORK)
def test_what_the_rule_says_is_so_however_the_work_is_cut(work: list[tuple[set[int], set[int], bool]]) -> None:
    for certain, found in zip(by_rule(work), by_machine(work), strict=True):
        assert certain & ~found == 0


@given(WORK)
def test_the_rule_says_no_less_than_is_certain(work: list[tuple[set[int], set[int], bool]]) -> None:
    """With every dispatch in an encoder of its own nothing else is ordered."""
    assert by_rule(work) == by_machine(work, cut_everywhere=True)


def test_what_is_read_is_not_safe_from_the_next_encoder() -> None:
    """A kernel that writes an input of an earlier one: ordered in one encoder, where it has it as an output, and not
    behind a cut; never where it has it as an input."""
    reads, writes = (({0}, {1}), (set[int](), {0}))
    for cut in (False, True):
        machine = by_machine([(*reads, cut), (*writes, False)])
        assert machine[1] == (0 if cut else 1)
    assert by_machine([(*reads, False), ({0}, {2}, False)])[1] == 0


def test_the_host_s_waits_order_what_comes_later() -> None:
    ordered = Ordered()
    first = ordered.dispatch([], [0])
    second = ordered.dispatch([], [1])
    ordered.wait([0])
    third = ordered.dispatch([], [2])
    assert ordered.comes_after(third, first) and not ordered.comes_after(third, second)
    assert ordered.is_done(first) and not ordered.is_done(second)
    ordered.synchronize()
    assert ordered.comes_after(ordered.dispatch([], [3]), second)

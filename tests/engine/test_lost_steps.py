"""Tests of failed steps: results that were read before are delivered, and arrays of the lost step are freed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from mlx_tandem.engine import core
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.pipeline import StepsLost
from tests.engine.front import Front, request
from tests.engine.reference import ReferenceRunner
from tests.engine.workloads import expected


@pytest.mark.parametrize("where", ["launch", "half"])
def test_a_step_that_was_read_before_a_launch_failed_is_delivered(
    make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Where launches wait for the device, the step before is read first. Here it ends a request."""
    monkeypatch.setattr(ReferenceRunner, "launch_waits", lambda *_: True)
    front = make_front(fail={2: where})
    short, long = request(1, max_tokens=2), request(2, max_tokens=6)
    front.send(m.Submit(short), m.Submit(long))
    front.finish()
    assert front.tokens(1) == expected(short, 0) and 1 in front.finished()
    assert [failed.request for failed in front.got(m.Failed)] == [2]
    assert front.tokens(2) == expected(long, 0)[:2]
    front.assert_nothing_is_held()


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_nothing_holds_what_a_lost_step_held(
    make_front: Callable[..., Front], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the tracebacks of its failure would hold arrays, and with them the pool that `reset` replaces."""
    monkeypatch.setattr(core.log, "disabled", True)  # pytest keeps what is logged
    front = make_front(fail={1: where})
    handled: list[BaseException | None] = []
    reset = front.runner.reset
    monkeypatch.setattr(front.runner, "reset", lambda: (handled.append(sys.exc_info()[1]), reset()))
    front.send(m.Submit(request(1)))
    gc.collect()
    gc.disable()
    try:
        front.finish()
        assert front.got(m.Failed)
        (lost,) = handled
        assert isinstance(lost, StepsLost) and (lost.__traceback__, lost.__cause__, lost.__context__) == (None,) * 3
        handled.clear()
        del lost
        assert not [each for each in gc.get_objects() if isinstance(each, StepsLost)]
    finally:
        gc.enable()

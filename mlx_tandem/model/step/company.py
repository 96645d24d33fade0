"""Users of the device beside the steps: threads that read adapters or write versions, and the work of learning.

A step may wait on the device for its numbers (`prebuilt.py`). Everything behind it waits, too, and a call of the driver
that waits for the device may keep Python's lock from the thread that would make the plan. So whoever makes or reads
arrays beside the steps does it within `with company:`. Entering lets a waiting step go on, and none waits until all
have left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Company:
    """The users of the device beside the steps of a runner. Entered and left on any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a pass may be collected as garbage, and closed, while it is held
        self._number = 0
        self._let_go: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._number += 1
            let_go, self._let_go = self._let_go, None
            if let_go is not None:
                let_go()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._number -= 1

    def around(self, work: Callable[P, T]) -> Callable[P, T]:
        """Return a function that does `work` in company, on any thread."""

        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return work(*args, **kwargs)

        return within

    # for the runner

    @property
    def waits(self) -> bool:
        """Whether a step waits that nobody has let go."""
        return self._let_go is not None

    def begin_to_wait(self, let_go: Callable[[], None]) -> bool:
        """Note that a step is going to wait until `let_go` is called; return False if it must not, since somebody uses
        the device.
        """
        with self._lock:
            if not self._number:
                self._let_go = let_go
            return not self._number

    def end_to_wait(self) -> bool:
        """Note that the runner itself lets the step go; return False if somebody has done that before."""
        with self._lock:
            let_go, self._let_go = self._let_go, None
            return let_go is not None

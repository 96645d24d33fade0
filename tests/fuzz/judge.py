"""What may become of a folder: it is accepted, or refused in one printable line that names the file and the field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.printable import printable
from tests.fuzz.folders import Case
from tests.texts import is_safe


class Tally:
    """How often each file was refused, and what was accepted: a fuzzer that only ever meets one of them is blind."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused: Counter[str] = Counter()

    @property
    def cases(self) -> int:
        return self.accepted + self.refused.total()


@contextmanager
def named(what: str, seed: int, case: Case) -> Iterator[None]:
    """Whatever fails within says how to see it again."""
    try:
        yield
    except BaseException as e:  # a panic in a library is no Exception
        e.add_note(f"{what}, seed {seed}: {case.changes}")
        raise


def judge(tally: Tally, case: Case, files: Iterable[str], read: Callable[[], object]) -> None:
    """Raise AssertionError unless `read` accepts the case or refuses it as it must. `files`: those it may name."""
    try:
        read()
    except InvalidRequest as e:
        tally.refused[check(e.message, e.param, case, files)] += 1
    else:
        tally.accepted += 1


def check(message: str, param: str | None, case: Case, files: Iterable[str]) -> str:
    """Return the file that a refusal names. Where exactly one thing in that file is wrong, it also names that."""
    assert is_safe(message) and is_safe(param or ""), ascii(message)
    found = [name for name in sorted(files, key=len, reverse=True) if name in message]
    assert found, f"no file is named: {message}"
    assert param, f"no field is named: {message}"
    names = case.changes[0].names if len(case.changes) == 1 and case.changes[0].file == found[0] else ()
    assert not names or any(printable(name[:60]) in message for name in names), f"{names} is not named: {message}"
    return found[0]

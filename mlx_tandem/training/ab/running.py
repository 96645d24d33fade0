"""The A/B tests of one server: which there are, the scores that come for them, and what they do to their aliases."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import msgspec

from mlx_tandem.adapters.aliases import AliasArm
from mlx_tandem.config import ABTest, Arm, Config
from mlx_tandem.errors import NotFound, TandemError
from mlx_tandem.files import StorageError
from mlx_tandem.generation.adapters.model_names import Models, Selection
from mlx_tandem.log import log
from mlx_tandem.training.ab.comparing import AliasTest, Verdict, check
from mlx_tandem.training.store.database import Database, Statement
from mlx_tandem.training.store.on_use import DatabaseOnUse
from mlx_tandem.training.store.records import seal
from mlx_tandem.training.store.saved import unsealed

State = Literal["running", "paused", "promoted", "taken_back"]
"""The state of a test.

paused: the adapter of an arm is not there, so that no score counts. promoted, taken_back: it has ended, and a
challenger or the control answers alone.
"""


@dataclass
class Judged:
    """An answer of an arm that is in a test. Its first score counts."""

    arm: AliasArm
    user: str | None
    has_counted: bool = False


class AliasTests:
    """All A/B tests of one server, on one event loop."""

    def __init__(self, config: Config, models: Models, database: DatabaseOnUse, clock: Callable[[], float]):
        """Begin without tests: `bring_up` finds them. `clock` returns the time in Unix seconds."""
        self._config, self._models, self._database, self._clock = config, models, database, clock
        self._tests: dict[str, AliasTest] = {}
        self._turn = asyncio.Lock()
        self._is_up = False

    async def bring_up(self) -> None:
        """Go on with the tests of the last start, and begin those of the settings; a second call does nothing.

        A test goes on unless the settings say something else of its alias than they did when it began. Raises
        StorageError and InvalidRequest for what the settings ask for.
        """
        if self._is_up:
            return
        async with self._turn:
            for test in await self._kept():
                if test.configured == self._configured(test.alias):
                    self._restore(test)
                else:
                    log("an a/b test is forgotten, since the settings of its alias have changed", alias=test.alias)
                    await self._write(_forgotten(test.alias))
        aliases = dict(self._config.aliases)
        for name, settings in self._config.ab_tests:
            if name not in self._tests:
                await self.put(name, aliases[name], settings)
        self._is_up = True

    async def put(self, name: str, arms: Sequence[Arm], settings: ABTest | None) -> tuple[AliasArm, ...]:
        """Let `name` stand for these arms from the next request on, and test them if there are settings for it.

        A test of the same arms with the same settings goes on, with the weights of `arms`. Raises InvalidRequest,
        NotFound, Conflict, QuotaExceeded, StorageError and EngineUnavailable; then nothing has changed.
        """
        async with self._turn:
            known, aliases = self._tests.get(name), self._models.aliases
            test, statements = self._next(name, arms, settings, known)
            before = aliases.arms(name) if name in aliases else ()
            made = await self._models.put_alias(name, arms, "" if test is None else test.id)
            try:
                if statements:
                    await self._write(statements)
            except TandemError:
                if before:
                    aliases.put(name, [Arm(arm.adapter, arm.weight) for arm in before], before[0].test)
                else:
                    aliases.remove(name)
                raise
            if test is not None:
                self._tests[name] = test
            elif known is not None:
                del self._tests[name]
            return made

    def _next(
        self, name: str, arms: Sequence[Arm], settings: ABTest | None, known: AliasTest | None
    ) -> tuple[AliasTest | None, list[Statement]]:
        """Return the test that an alias has from now on, and what is written for it. Raises InvalidRequest."""
        if settings is None:
            return None, [] if known is None else _forgotten(name)
        check(settings, arms)
        if known is not None and known.continues(settings, arms):
            test = _copy(known)
            test.weigh(arms)
            return test, [_saved(test)]
        id = secrets.token_hex(8)
        test = AliasTest.begin(id, name, settings, arms, self._configured(name), self._clock())
        return test, [*_forgotten(name), _saved(test)]

    async def remove(self, name: str) -> None:
        """Remove an alias and its test. Raises NotFound, and StorageError; then nothing has changed."""
        async with self._turn:
            self._models.aliases.arms(name)
            if name in self._tests:
                await self._write(_forgotten(name))
                del self._tests[name]
            self._models.aliases.remove(name)

    def judged(self, model: Selection) -> Judged | None:
        """Return the answer that `model` will give, if its scores count for a test; None if not."""
        return Judged(model.arm, model.user) if model.arm is not None and model.arm.test else None

    async def count(self, answer: Judged, scores: Iterable[float | None]) -> None:
        """Count the mean of the scores of one answer, or of its choices; do nothing if it has counted already, has no
        score, or its test has ended.

        The alias has its new arms when this returns, and what was counted is on the drive. Raises StorageError.
        """
        given = [score for score in scores if score is not None]
        async with self._turn:
            test = self._tests.get(answer.arm.alias)
            if not given or answer.has_counted or test is None or test.id != answer.arm.test or self._missing(test):
                return
            database = await self._database.open()
            user = None if answer.user is None else _digest(test.id, answer.user)
            if user is not None and await asyncio.to_thread(_has_counted, database, test.alias, user):
                answer.has_counted = True
                return
            changed = _copy(test)
            verdicts = changed.add(answer.arm.adapter, fmean(given), self._clock())
            now_counted: list[Statement] = []
            if user is not None:
                now_counted = [("INSERT OR IGNORE INTO ab_users VALUES (?, ?)", (test.alias, user))]
            if changed.decided is not None:
                now_counted = [("DELETE FROM ab_users WHERE alias = ?", (test.alias,))]
            await self._write([_saved(changed), *now_counted])
            self._tests[test.alias] = changed
            answer.has_counted = True
            if verdicts:
                self._serve(changed)
            for adapter, verdict in verdicts:
                _report(changed, adapter, verdict)

    async def count_in_background(self, answer: Judged, scores: Iterable[float | None]) -> None:
        """Count scores of which nobody waits to hear: an error is logged."""
        try:
            await self.count(answer, scores)
        except TandemError as e:
            log("the score of an answer was not counted in an a/b test", logging.WARNING, error=e.message)

    def describe(self, name: str) -> dict[str, Any] | None:
        """Return the test of an alias for clients; None if it has none."""
        test = self._tests.get(name)
        if test is None:
            return None
        settings: dict[str, Any] = msgspec.to_builtins(test.settings)
        return settings | {
            "state": self.state(test),
            "missing": self._missing(test),
            "began": int(test.began),
            "decided": None if test.decided is None else int(test.decided),
            "arms": [_described(test, arm.adapter) for arm in test.arms],
        }

    def __iter__(self) -> Iterator[AliasTest]:
        """Yield all tests."""
        return iter(self._tests.values())

    def state(self, test: AliasTest) -> State:
        """Return the state of a test."""
        if test.decided is not None:
            won = any(each.verdict == "promoted" for each in test.challengers.values())
            return "promoted" if won else "taken_back"
        return "paused" if self._missing(test) else "running"

    # -- parts ----------------------------------------------------------------------------------------------------

    def _missing(self, test: AliasTest) -> list[str]:
        """Return the arms that serve in a test and whose adapter is not there."""
        return [arm.adapter for arm in test.serving if not self._is_there(arm.adapter)]

    def _is_there(self, adapter: str) -> bool:
        try:
            self._models.status(adapter)
        except NotFound:
            return False
        return True

    def _configured(self, name: str) -> tuple[tuple[Arm, ...] | None, ABTest | None]:
        """Return what the settings say of an alias."""
        return dict(self._config.aliases).get(name), dict(self._config.ab_tests).get(name)

    def _restore(self, test: AliasTest) -> None:
        """Take a test of an earlier start with its alias, unless something else has its name now."""
        try:
            self._models.rules.check_alias(test.alias)
            self._serve(test)
        except TandemError as e:
            log("an a/b test does not go on", logging.WARNING, alias=test.alias, error=e.message)
        else:
            self._tests[test.alias] = test

    def _serve(self, test: AliasTest) -> None:
        """Let the alias stand for the arms that its test leaves."""
        self._models.aliases.put(test.alias, test.serving, "" if test.decided is not None else test.id)

    async def _kept(self) -> list[AliasTest]:
        """Return the tests in the database.

        A server that does not learn takes the folder only if there is a test, and if no other server has it.
        """
        try:
            shared, folder = self._database.is_shared, self._database.folder
            if not shared and not await asyncio.to_thread(Database.holds, folder, "ab_tests"):
                return []
            database = await self._database.open()
        except StorageError as e:
            if self._database.is_shared:
                raise
            log("a/b tests of an earlier start do not go on", logging.WARNING, error=e.message)
            return []
        rows = await asyncio.to_thread(database.rows, "SELECT alias, body FROM ab_tests ORDER BY alias")
        return [unsealed(database, body, AliasTest, f"the a/b test of {alias}") for alias, body in rows]

    async def _write(self, statements: Sequence[Statement]) -> None:
        database = await self._database.open()
        await asyncio.to_thread(database.write, statements)


def _copy(test: AliasTest) -> AliasTest:
    """Return a test that can be changed without changing the other."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(test), type=AliasTest)


def _has_counted(database: Database, alias: str, user: bytes) -> bool:
    return bool(database.rows("SELECT 1 FROM ab_users WHERE alias = ? AND user = ?", alias, user))


def _saved(test: AliasTest) -> Statement:
    return "INSERT OR REPLACE INTO ab_tests VALUES (?, ?)", (test.alias, seal(test))


def _forgotten(alias: str) -> list[Statement]:
    return [(f"DELETE FROM {table} WHERE alias = ?", (alias,)) for table in ("ab_tests", "ab_users")]


def _digest(id: str, user: str) -> bytes:
    return hashlib.blake2b(f"{id}/{user}".encode(errors="surrogatepass"), digest_size=16).digest()


def _report(test: AliasTest, adapter: str, verdict: Verdict) -> None:
    """Log a verdict."""
    comparison = test.challengers[adapter].comparison
    log(
        "arm promoted" if verdict == "promoted" else "arm taken back",
        alias=test.alias,
        arm=adapter,
        control=test.settings.control,
        compared=comparison.count,
        difference=round(comparison.mean, 4),
        serving=[arm.adapter for arm in test.serving],
    )


def _described(test: AliasTest, adapter: str) -> dict[str, Any]:
    """Return an arm of a test for clients."""
    scores, challenger = test.scores[adapter], test.challengers.get(adapter)
    found: dict[str, Any] = {"adapter": adapter, "answers": scores.answers, "mean_score": scores.mean}
    if challenger is None:
        return found
    comparison, count = challenger.comparison, len(test.challengers)
    return found | {
        "compared": comparison.count,
        "mean_difference": comparison.mean if comparison.count else None,
        "better": {"evidence": comparison.gain.wealth, "needed": count / test.settings.false_promotion},
        "worse": {"evidence": comparison.harm.wealth, "needed": count / test.settings.false_take_back},
        "verdict": challenger.verdict,
    }

"""The client of the processes that check constraints, with a cache of their answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.grammar.constraint import Constraint
from mlx_tandem.generation.grammar.messages import Compiled, Refused, decode_answer
from mlx_tandem.isolation.frames import encode
from mlx_tandem.isolation.pool import Bounds, WorkerPool
from mlx_tandem.isolation.process import Lost, LostKind, Program
from mlx_tandem.limits import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_MEMORY
from mlx_tandem.types import EngineInfo, Grammar

WORKERS = 2
"""Most processes. When a constraint takes long in one of them, the other still checks those of other callers."""

BOUNDS = Bounds(items=256, bytes=64 * MAX_GRAMMAR_BYTES, seconds=30.0)
"""Limits of the queue in front of the processes."""

MOST_KEPT = 256
"""Most grammars that are kept, the last used ones."""

MOST_KEPT_BYTES = 32 << 20
"""Most bytes of the texts of the grammars that are kept."""

LOST: Mapping[LostKind, str] = {
    "timeout": "takes too long to compile",
    "memory": f"needs more than {MAX_GRAMMAR_MEMORY >> 20} MB of memory to compile",
    "died": "cannot be compiled",
}
"""The words of errors for each way in which a process can be lost."""

_Answer = Compiled | Refused


class Constraints:
    """A compiler of constraints in worker processes, which are started for the first constraint.

    It belongs to one event loop.
    """

    def __init__(self, folder: Path, info: Callable[[], EngineInfo]):
        """Prepare the processes. `folder` has the tokenizer; `info` returns the description of the engine."""
        self._folder = folder
        self._info = info
        self._pool: WorkerPool[_Answer] | None = None
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()  # grammars by the digest of their constraint
        self._kept_bytes = 0

    async def grammar(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint. Raises InvalidRequest naming the field or the keyword in it.

        Overloaded is raised when too many constraints wait already.
        """
        param = constraint.param
        try:
            item = encode(constraint)
        except UnicodeEncodeError as e:
            raise InvalidRequest(f"{param} holds half a surrogate pair", param=param) from e
        if len(item) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param} is over the limit of {MAX_GRAMMAR_BYTES} bytes", param=param)
        digest = sha256(item).digest()
        text = self._kept.get(digest)
        if text is None:
            text = await self._compiled(item, param)
            self._keep(digest, text)
        else:
            self._kept.move_to_end(digest)
        return Grammar(text, param)

    def _keep(self, digest: bytes, text: bytes) -> None:
        """Keep a grammar, and drop those that were not used for longest while there are too many or too large ones."""
        self._kept_bytes += len(text) - len(self._kept.pop(digest, b""))  # another request may have kept it meanwhile
        self._kept[digest] = text
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await self._pool.close()

    async def _compiled(self, item: bytes, param: str) -> bytes:
        if self._pool is None:
            self._pool = WorkerPool("grammars", self._program(), WORKERS, BOUNDS)
        answer = await self._pool.ask(item)
        if isinstance(answer, Compiled):
            return answer.grammar.encode()
        if isinstance(answer, Lost):
            raise InvalidRequest(f"{param} {LOST[answer.kind]}", param=param)
        where = answer.where or param
        raise InvalidRequest(f"{where}: {answer.message}", param=where)

    def _program(self) -> Program[_Answer]:
        info = self._info()
        ids = ",".join(map(str, info.eos_token_ids))
        arguments = (str(self._folder.absolute()), str(MAX_GRAMMAR_MEMORY), str(info.vocab_size), ids)
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        most = 8 * MAX_GRAMMAR_BYTES
        return Program("mlx_tandem.generation.grammar.worker", arguments, decode_answer, most, environment=environment)

"""The program that tokenises long texts: `python -m mlx_tandem.generation.tokenizing.worker FD FOLDER BYTES`.

FD is its socket and FOLDER has the tokenizer. The kernel ends the process when a text takes more CPU time than
`cpu_seconds` allows. Besides the memory that it has with its tokenizer loaded, the process may use BYTES more. It runs
at a lower priority than the server.
"""

from __future__ import annotations

import os
import signal
import sys
from array import array
from pathlib import Path

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.generation.tokenizing.listing import listing
from mlx_tandem.generation.tokenizing.messages import (
    Answer,
    Decode,
    Encode,
    Failed,
    FindSpecial,
    Found,
    Ids,
    List,
    Question,
    Text,
    decode_question,
)
from mlx_tandem.isolation.program import connect, limit_memory, out_of_memory, say_busy, serve, time_limit
from mlx_tandem.limits import MAX_TEXT_BYTES, MAX_TEXT_REPLY, check_token_ids
from mlx_tandem.strict_json import dumps

SECONDS = 2.0
"""CPU seconds that every text may take, however short it is."""

SECONDS_PER_MIB = 4.0
"""CPU seconds that each 2^20 bytes of a text may add. The tokenizers of known models take a tenth of it."""

REAL_SECONDS_PER_SECOND = 20.0
"""Seconds of real time that one second of CPU time may take while other programs use the machine."""

NICENESS = 15
"""Added to the process's nice value."""


class Worker:
    """A tokenizer that answers questions about texts."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def answer(self, raw: bytes) -> Answer:
        """Return the answer to an encoded question. A lack of memory ends the process."""
        try:
            with time_limit(signal.ITIMER_PROF, cpu_seconds(len(raw))):
                return self._answer(decode_question(raw))
        except InvalidRequest as e:
            return Failed("refused", e.message, e.param)
        except MemoryError:
            out_of_memory()
        except BaseException:  # A panic of the library is not derived from Exception.
            return Failed("failed")

    def _answer(self, question: Question) -> Answer:
        tokenizer = self._tokenizer
        match question:
            case Encode():
                return Ids(array("I", self._ids(question)).tobytes())
            case List(text, pieces):
                found = listing(tokenizer, self._ids(text), pieces=pieces)
                size = len(found.tokens) + len(found.pieces or b"")
                return found if size <= MAX_TEXT_REPLY else Failed("too_large")
            case Decode(given, vocab_size, param):
                ids = check_token_ids(given, vocab_size, param)
                written = dumps(tokenizer.decode(ids, show_special=True))
                return Text(written) if len(written) <= MAX_TEXT_REPLY else Failed("too_large")
            case FindSpecial(texts):
                return Found(next((i for i, text in enumerate(texts) if tokenizer.spells_special(text)), None))

    def _ids(self, asked: Encode) -> list[int]:
        if asked.begins:
            ((text, _),) = asked.parts
            return self._tokenizer.encode(text, add_special_tokens=True)
        return self._tokenizer.encode_parts(asked.parts)


def cpu_seconds(size: int) -> float:
    """Return the CPU seconds that a text of `size` bytes may take."""
    return SECONDS + SECONDS_PER_MIB * size / 2**20


def main(fd: str, folder: str, size: str) -> None:
    """Load the tokenizer and answer questions until the socket is closed."""
    sock = connect(fd)
    os.nice(NICENESS)
    worker = Worker(Tokenizer.load(Path(folder)))
    limit_memory(int(size))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # The library prints long reports of its panics.
    say_busy(sock, REAL_SECONDS_PER_SECOND * cpu_seconds(MAX_TEXT_BYTES))
    serve(sock, sock.makefile("rb"), worker.answer)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Bytes of a file that are not what they were."""

from __future__ import annotations

from random import Random

DEEP = 100_000


def spoiled(rng: Random, data: bytes) -> bytes:
    """`data` cut, lengthened, with bytes changed, or something else altogether."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(14):
        case 0:
            return data[:at]
        case 1:
            return data + rng.randbytes(rng.choice((1, 7, 8, 100)))
        case 2:
            return data[:at] + rng.randbytes(rng.choice((1, 4, 9))) + data[at:]
        case 3 | 4 | 5 | 6:
            some = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 5))):
                if some:
                    some[rng.randrange(min(len(some), 2000))] = rng.randrange(256)
            return bytes(some)
        case 7:
            return rng.choice((b"", b" ", b"\0" * 100, b"null", b"3", b"[]", b"{}", b'""', b"true", b"{" * 10))
        case 8:
            return b"\xef\xbb\xbf" + data
        case 9:
            return data.decode("latin-1").encode("utf-16")
        case 10:
            return rng.choice((b"[", b'{"a":')) * DEEP
        case 11:
            return b'{"a": ' + b"9" * rng.choice((4000, 5000)) + b"}"
        case 12:
            return data[at:] + data[:at]
        case _:
            return rng.randbytes(rng.choice((1, 8, 64, 500)))

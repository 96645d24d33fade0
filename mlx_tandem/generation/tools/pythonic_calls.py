"""Reading calls in Python's notation: [name(key=value, ...), ...], or one of them without the brackets."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Malformed, Routine
from mlx_tandem.generation.tools.calls import CallParser
from mlx_tandem.generation.tools.json_writer import JsonWriter
from mlx_tandem.generation.tools.schema_types import properties_of, types_of
from mlx_tandem.generation.tools.values import ValueReader, quoted


def read_pythonic(parser: CallParser, *, offered_only: bool = False) -> Routine[None]:
    """Read a list of calls, or calls without the brackets of a list.

    With `offered_only`, a name that the request does not offer makes no call. Raises Malformed.
    """
    in_list = bool((yield from parser.accept("[")))
    while True:
        yield from parser.gap()
        name = yield from parser.name()
        if (offered_only and name not in parser.tools.functions) or not (yield from parser.accept("(")):
            raise Malformed
        reader = parser.values(is_python=True)
        if in_list:
            reader.open.append(("]", "calls"))
        reader.open.append((")", "arguments"))
        out = parser.argument_writer(name, spaced=True)
        yield from parser.written(out, _read_arguments(parser, reader, out, name))
        if not (yield from parser.accept(",")):
            break
        if in_list and (yield from parser.ahead(("]",)))[0] == "]":
            break
    if in_list and not (yield from parser.accept("]")) and not parser.is_at_end:
        raise Malformed
    parser.checkpoint()


def _read_arguments(parser: CallParser, reader: ValueReader, out: JsonWriter, name: str) -> Routine[None]:
    """Read the arguments of one call and the bracket behind them. Those without a key get it by their order."""
    schema = parser.tools.schema(name)
    properties = properties_of(schema)
    keys = [*properties]
    first = yield from parser.gap()
    if first == "{" and (not keys or "object" not in types_of(properties[keys[0]], schema)):
        yield from reader.object(out, keyed=True)
        yield from parser.accept(")")
        return
    count = 0
    while first != ")":
        if not first:
            raise Malformed
        if first == ",":
            parser.scan.skip()
        else:
            if not count:
                yield from out.begin("{")
            if (yield from reader.key_follows()):
                yield from reader.pair(out)
            else:
                out.key(quoted(keys[count] if count < len(keys) else f"arg{count}"))
                yield from reader.value(out)
            count += 1
        first = yield from parser.gap()
    parser.scan.skip()
    if not count:
        yield from out.begin("{")
    yield from out.end()

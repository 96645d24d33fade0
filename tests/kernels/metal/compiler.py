"""Metal's text through clang's front end: what Metal's compiler would refuse, and what a device could not run.

Metal's language is C++14 with address spaces. Clang's C++ for OpenCL has the same address spaces and the same bans
(double, function pointers, shared memory outside of kernels); what only Metal bans is looked for in the syntax tree.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from clang import cindex
from clang.cindex import Cursor, CursorKind, TypeKind

from tests.kernels.metal.text import Call

STDLIB = Path(__file__).with_name("stdlib.h")

# Apple's table of limits by GPU family ("Metal feature set tables"): the same for Apple7 (M1) to Apple10.
MOST_BUFFERS = 31
MOST_SHARED_BYTES = 32_768
MOST_THREADS = 1024
SIMD_WIDTH = 32

_FLAGS = (
    *("-x", "cl", "-cl-std=clc++2021", "-target", "x86_64-linux-gnu", "-nostdinc", "-cl-no-stdinc"),
    *(
        "-Xclang",
        "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space",
        "-Wall",
        "-Wno-unused",
        "-Wno-unknown-attributes",
    ),
)
_PLACES = {"device", "constant", "threadgroup", "thread", "GLOBAL", "auto"}
_DIVISIONS = {4: "/", 5: "%", 24: "/=", 25: "%="}
"""The operators that divide, by their numbers in clang's `CXBinaryOperatorKind`."""
_WIDE = {TypeKind.LONG, TypeKind.ULONG, TypeKind.LONGLONG, TypeKind.ULONGLONG}
_NAMED = {CursorKind.VAR_DECL, CursorKind.PARM_DECL, CursorKind.FIELD_DECL, CursorKind.CSTYLE_CAST_EXPR}
_POINTERS = {TypeKind.POINTER, TypeKind.LVALUEREFERENCE, TypeKind.RVALUEREFERENCE}
_ENDLESS = re.compile(r"\b(INFINITY|NAN|HUGE_VALF?|__builtin_(inff?|nanf?|huge_valf?))\b")

_lib = cindex.conf.lib
_lib.clang_getCursorBinaryOperatorKind.argtypes = [Cursor]  # this version's Python package does not declare it
_lib.clang_getCursorBinaryOperatorKind.restype = ctypes.c_int


@cache
def _stdlib() -> str:
    return STDLIB.read_text(encoding="utf-8")


def problems(call: Call) -> list[str]:
    """Return everything that is wrong with a call's text or its size; empty when Metal would take it."""
    head = _stdlib() + "\n"
    name = f"{call.name}.clcpp"
    index = cindex.Index.create()
    unit = index.parse(name, args=list(_FLAGS), unsaved_files=[(name, head + call.text)])
    first = head.count("\n")
    found = [f"line {d.location.line - first}: {d.spelling}" for d in unit.diagnostics if d.severity >= d.Warning]
    found += [f"line {i}: it is not ASCII" for i, line in enumerate(call.text.splitlines(), 1) if not line.isascii()]
    if not any(d.severity >= d.Error for d in unit.diagnostics):
        nodes = list(_own(unit.cursor, first))
        found += [f"line {n.location.line - first}: {what}" for n in nodes if (what := _banned(n))]
        shared = sum(n.type.get_size() for n in nodes if _is_shared(n))
        if shared > MOST_SHARED_BYTES:
            found.append(f"{shared} bytes of threadgroup memory, of {MOST_SHARED_BYTES}")
    if match := _ENDLESS.search(call.text):
        found.append(f"{match[0]}: fast arithmetic may assume that there is none")
    if call.buffers > MOST_BUFFERS:
        found.append(f"{call.buffers} buffers, of {MOST_BUFFERS}")
    if call.threads > MOST_THREADS or call.threads % SIMD_WIDTH:
        found.append(f"{call.threads} threads: at most {MOST_THREADS}, a multiple of {SIMD_WIDTH}")
    return found


def _own(root: Cursor, first: int) -> Iterator[Cursor]:
    """Every node of the kernel's own text, which begins behind line `first`."""
    for node in root.walk_preorder():
        if node.location.file is not None and node.location.line > first:
            yield node


def _banned(node: Cursor) -> str:
    """What Metal bans and C++ for OpenCL has; empty for a node that Metal takes."""
    if node.kind == CursorKind.LAMBDA_EXPR:
        return "a lambda"
    if node.kind in (CursorKind.GOTO_STMT, CursorKind.CXX_TRY_STMT, CursorKind.CXX_THROW_EXPR):
        return "a jump that Metal does not have"
    if (operator := _DIVISIONS.get(_lib.clang_getCursorBinaryOperatorKind(node))) and _divides_wide(node):
        return f"{operator} of 64-bit integers, which Apple's GPUs compute by a long function"
    if node.kind in _NAMED and node.type.kind in _POINTERS and not _PLACES & {t.spelling for t in node.get_tokens()}:
        return f"the pointer or reference {node.spelling} names no address space".replace("  ", " ")
    return ""


def _divides_wide(node: Cursor) -> bool:
    """Whether a division has 64 bits. In a template its own type may not be known, but that of an operand is."""
    return any(each.type.get_canonical().kind in _WIDE for each in (node, *node.get_children()))


def _is_shared(node: Cursor) -> bool:
    return node.kind == CursorKind.VAR_DECL and "__local" in node.type.spelling and node.type.kind not in _POINTERS

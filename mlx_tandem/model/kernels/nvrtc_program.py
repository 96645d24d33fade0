"""The program that compiles one text with NVRTC: `python -I -S nvrtc_program.py`.

NVRTC compiles one text at a time in a process, whatever the number of threads, so each text gets a process. The program
imports the standard library only, since it is started dozens of times. It reads a job from stdin as JSON, with the
arguments of `compiled`, and writes a line of JSON to stdout: `{"names": […]}`, behind which the machine code follows,
or `{"error": "…"}`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterable, Mapping, Sequence


class Refused(Exception):
    """Raised when NVRTC does not compile a text; the message is its log."""


def compiled(
    library: str, name: str, text: str, headers: Mapping[str, str], instances: Sequence[str], options: Sequence[str]
) -> tuple[list[str], bytes]:
    """Return the names of instances of templates in the machine code of a text, and the code.

    Args:
        library: The path of NVRTC.
        name: The name of the text in messages.
        text: The text.
        headers: The texts of headers that are in no file, by name.
        instances: The instances of templates that are compiled. Functions that are no templates need not be named.
        options: NVRTC's options, which name the architecture and the folders of headers.

    Raises:
        Refused: NVRTC cannot compile it.
    """
    nvrtc, program, size = ctypes.CDLL(library), ctypes.c_void_p(), ctypes.c_size_t()
    count, texts, names = len(headers), _strings(headers.values()), _strings(headers)
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), count, texts, names):
        raise Refused("NVRTC cannot create a program")
    for instance in instances:
        nvrtc.nvrtcAddNameExpression(program, instance.encode())
    if nvrtc.nvrtcCompileProgram(program, len(options), _strings(options)):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        said = ctypes.create_string_buffer(size.value + 1)
        nvrtc.nvrtcGetProgramLog(program, said)
        raise Refused(said.value.decode(errors="replace"))
    if nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) or not size.value:
        raise Refused("NVRTC has no machine code for this device")
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    lowered = []
    for instance in instances:
        found = ctypes.c_char_p()
        if nvrtc.nvrtcGetLoweredName(program, instance.encode(), ctypes.byref(found)) or not found.value:
            raise Refused(f"NVRTC has no name for {instance}")
        lowered.append(found.value.decode())
    return lowered, code.raw


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def main() -> None:
    """Compile the text on stdin."""
    try:
        names, code = compiled(**json.load(sys.stdin))
        found: dict[str, object] = {"names": names}
    except (OSError, Refused) as e:
        found, code = {"error": str(e)}, b""
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n" + code)


if __name__ == "__main__":
    main()

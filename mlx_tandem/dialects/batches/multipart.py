"""Reads bodies of the type multipart/form-data, with which clients upload files, within limits."""

from __future__ import annotations

import re
from email.message import Message

from mlx_tandem.errors import InvalidRequest

MOST_PARTS = 16
"""Most parts of a form."""

MOST_HEADERS = 4096
"""Most bytes of the headers of a part."""

MOST_VALUE = 1024
"""Most bytes of a part that is no file."""

_BOUNDARY = re.compile(rb"--([0-9A-Za-z'()+_,./:=? -]{1,70})\r?\n")


def fields(body: bytes) -> tuple[dict[str, str], dict[str, tuple[str, bytes]]]:
    """Return the values of a form by their names, and its files with the names that the client gives them.

    The boundary is that of the first line. Raises InvalidRequest for a body that is no such form or is over a limit.
    """
    first = _BOUNDARY.match(body)
    if first is None:
        raise InvalidRequest("the body is not multipart/form-data: it does not begin with a boundary")
    parts = body.split(b"\r\n--" + first[1].rstrip(), MOST_PARTS + 1)
    if len(parts) > MOST_PARTS + 1:
        raise InvalidRequest(f"the form has over {MOST_PARTS} parts")
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise InvalidRequest("the form ends before its last boundary")
    values: dict[str, str] = {}
    files: dict[str, tuple[str, bytes]] = {}
    parts[0] = parts[0][first.end() - 2 :]  # with the line break before its headers, like the others
    for part in parts[:-1]:
        head, found, content = part.partition(b"\r\n\r\n")
        if not found or len(head) > MOST_HEADERS:
            raise InvalidRequest("a part of the form has no headers, or too long ones")
        name, file = _names(head)
        if name in values or name in files:
            raise InvalidRequest(f"the form has {name[:40]!r} twice", param=name)
        if file is not None:
            files[name] = (file, content)
        elif len(content) > MOST_VALUE:
            raise InvalidRequest(f"{name[:40]!r} has over {MOST_VALUE} bytes and no filename", param=name)
        else:
            values[name] = content.decode("utf-8", "replace")
    return values, files


def _names(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and the name of its file if it is one. Raises InvalidRequest without a name."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            message = Message()
            message["content-disposition"] = value.strip()
            name = message.get_param("name", header="content-disposition")
            try:
                file = message.get_filename()
            except UnicodeError:  # of an encoding that cannot say what is there
                raise InvalidRequest("a part of the form has a filename in no usable encoding", param="file") from None
            if isinstance(name, str) and name:
                return name, file
    raise InvalidRequest("a part of the form has no name")

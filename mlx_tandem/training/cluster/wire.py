"""What the machines say to each other: JSON of these types, in which every number and text is bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.printable import printable
from mlx_tandem.training.trajectories import Trajectory

CHUNK = 4 << 20
"""Most bytes of a file that one request carries."""

MOST_BODY = 8 << 20
"""Most bytes of trajectories that one request carries, unless a single one is larger. A body may have
`limits.MAX_PROGRAM_BODY` bytes.
"""

MOST_ITEMS = 512
"""Most trajectories that one request carries."""

MOST_REPLY = 16 << 20
"""Most bytes of a reply."""

MOST_WAIT = 30.0
"""Most seconds for which a request may wait for something new."""

PATH = "/v1/cluster"
"""The beginning of all paths."""

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$(?!\n)")]
Name = Annotated[str, Meta(pattern=rf"^{limits.NAME.pattern}$(?!\n)")]
Number = Annotated[int, Meta(ge=1, le=2**52)]
Text = Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$")]
FileName = Literal["adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"]


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of an adapter's folder."""

    name: FileName
    size: Annotated[int, Meta(ge=1, le=limits.MAX_ADAPTER_BYTES)]
    sha256: Sha256


class Version(Struct, frozen=True, forbid_unknown_fields=True):
    """One version of an adapter, which the machines know by the same number."""

    number: Number
    digest: Sha256  # of its content, as the engine computes it
    files: Annotated[tuple[File, ...], Meta(min_length=2, max_length=2)]


class Adapter(Struct, frozen=True, forbid_unknown_fields=True):
    """A name, its versions in the order of their publication, and the version that the name stands for."""

    name: Name
    current: Number
    versions: Annotated[tuple[Version, ...], Meta(min_length=1, max_length=64)]


class Base(Struct, frozen=True, forbid_unknown_fields=True):
    """The leader's base model, and the adapter that is trained on it."""

    sha256: Sha256  # of its files, see bases.py
    name: Text  # of its folder
    id: Text  # on the Hugging Face hub; empty: it has none
    names: Annotated[tuple[Text, ...], Meta(max_length=64)]  # by which requests may ask for it
    adapter: Name  # that is trained


class Feed(Struct, frozen=True, forbid_unknown_fields=True):
    """All adapters of the leader as they are now. A higher sequence is newer, as long as the leader is the same."""

    leader: Id  # of this run of the leader
    sequence: Annotated[int, Meta(ge=0, le=2**53)]
    base: Sha256
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=4096)]
    trainers: Annotated[int, Meta(ge=1, le=64)] = 1  # whose versions are averaged; 1: each is served as it is


class Publication(Struct, frozen=True, forbid_unknown_fields=True):
    """A version that a trainer wants the leader to serve as the current one. The leader has its files already."""

    trainer: Id
    base: Sha256
    adapter: Name
    version: Version


class Contribution(Struct, frozen=True, forbid_unknown_fields=True):
    """What one of several trainers has learned in a round. The leader has its files already."""

    trainer: Id
    base: Sha256
    adapter: Name
    version: Version  # under the trainer's own number
    begun: Annotated[int, Meta(ge=0, le=2**53)]  # number of the leader's version that it was learned from; 0: none
    examples: Annotated[int, Meta(ge=0, le=2**40)]  # that it was learned from


class Item(Struct, frozen=True, forbid_unknown_fields=True):
    """A scored trajectory, and how many its group will have in all; 0: nobody knows."""

    trajectory: Trajectory
    size: Annotated[int, Meta(ge=0, le=4096)] = 0
    number: Annotated[int, Meta(ge=0, le=2**62)] = 0  # in the queue that it comes from


class Items(Struct, frozen=True, forbid_unknown_fields=True):
    """Trajectories on their way to a leader or a trainer, which has the same base."""

    base: Sha256
    queue: Id  # whose numbers the items have
    items: Annotated[tuple[Item, ...], Meta(max_length=MOST_ITEMS)]


class Received(Struct, frozen=True):
    """How many bytes of a file, or how many trajectories, the leader has now."""

    received: int


Message = TypeVar("Message", bound=Struct)


def decode(content: bytes, kind: type[Message]) -> Message:
    """Return a message. Raises InvalidRequest for bytes that are no message of this kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"this is no {kind.__name__}: {printable(str(e), 300)}", param="body") from None


def plain(message: Struct) -> Any:
    """Return a message as dicts, lists, texts and numbers."""
    return msgspec.to_builtins(message)

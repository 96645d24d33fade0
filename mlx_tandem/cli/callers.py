"""The names by which `tandem` can be called, and what differs under each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """The differences when `tandem` is called by another program's name."""

    also_called: str = ""  # a further name of the base, which that program's clients use for any model
    port: int | None = None  # default port

    def defaults(self) -> dict[str, object]:
        """Return the defaults by the path of the setting in config.py."""
        return {} if self.port is None else {"server.port": self.port}


CALLERS = {
    "tandem": Caller(),
    "mlx-server": Caller(also_called="model", port=8080),
    "mlx_parallm_serve": Caller(also_called="base-model"),
}

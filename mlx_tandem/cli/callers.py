"""The names that `tandem` can be called by, and what differs under each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """What differs when `tandem` is called by another program's name."""

    also_called: str = ""  # a further name of the base: that program's requests use it whatever the model is
    port: int | None = None  # where no setting says one

    def defaults(self) -> dict[str, object]:
        """Return the settings that this program has other defaults for, by their place in config.py."""
        return {} if self.port is None else {"server.port": self.port}


CALLERS = {
    "tandem": Caller(),
    "mlx-server": Caller(also_called="model", port=8080),
    "mlx_parallm_serve": Caller(also_called="base-model"),
}

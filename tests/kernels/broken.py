"""Kernels that are wrong on purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_tandem.model.kernels.dialect import Kernel, Make, Source


@dataclass(frozen=True)
class Broken:
    """Makes kernels of bodies in which some text is another."""

    make: Make
    right: str
    wrong: str

    def __call__(self, source: Source) -> Kernel:
        body, functions = (text.replace(self.right, self.wrong) for text in (source.body, source.functions))
        return self.make(replace(source, body=body, functions=functions))

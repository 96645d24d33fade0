"""Kernels that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_tandem.model.kernels.dialect import Kernel, Make


@dataclass(frozen=True)
class Broken:
    """Makes kernels of bodies in which some text is another."""

    make: Make
    right: str
    wrong: str

    def __call__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        functions: str = "",
        writes: Sequence[str] = (),
    ) -> Kernel:
        texts = (text.replace(self.right, self.wrong) for text in (body, functions))
        return self.make(name, inputs, outputs, *texts, writes)

"""mlx-tandem: one base model in memory, many LoRA adapters served from it in one batch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_tandem.api import Engine

__all__ = ["Engine", "__version__"]

__version__: str


def __getattr__(name: str) -> object:
    # Engine brings the tokenizer and the engine in, and the version a reader of packages: neither `tandem --help` nor a
    # worker process must pay for what it does not use.
    if name == "Engine":
        from mlx_tandem.api import Engine

        return Engine
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("mlx-tandem")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0.0.0"
    raise AttributeError(f"module 'mlx_tandem' has no attribute {name!r}")

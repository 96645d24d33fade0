"""mlx-tandem: one base model in memory, many LoRA adapters served from it in one batch."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mlx-tandem")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> object:
    # Engine brings the tokenizer and the engine in; `tandem --help` must not pay for them.
    if name == "Engine":
        from mlx_tandem.api import Engine

        return Engine
    raise AttributeError(f"module 'mlx_tandem' has no attribute {name!r}")

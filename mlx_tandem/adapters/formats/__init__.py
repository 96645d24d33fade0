"""Reads mlx-lm's and PEFT's LoRA folders into plain arrays without trusting a byte of them.

`read` opens each file once, relative to the folder's descriptor, and works on that descriptor only: what is checked,
hashed and loaded is one and the same file. The Rust `safetensors` library checks the header (sizes, overlaps, holes,
overflow); then names, types, shapes and the total size are compared with the served model before any tensor data is
read. A setting that would change the meaning of the adapter and is not supported is refused by name.
"""

from mlx_tandem.adapters.formats.loading import from_arrays, read
from mlx_tandem.adapters.formats.parts import CONFIG, WEIGHTS, AdapterWeights, Array, Format, LinearShape

__all__ = ["CONFIG", "WEIGHTS", "AdapterWeights", "Array", "Format", "LinearShape", "from_arrays", "read"]

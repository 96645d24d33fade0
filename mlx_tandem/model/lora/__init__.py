"""LoRA adapters on the device: their arrays, and how the rows of a step reach them."""

"""LoRA adapters as data: names and versions, aliases, slots, what is in memory, and the file formats."""

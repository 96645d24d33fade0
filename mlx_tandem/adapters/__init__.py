"""LoRA adapters as data: names and versions, aliases, slots, what is in memory, and the file formats."""

CONFIG = "adapter_config.json"
"""Name of the configuration in both formats."""

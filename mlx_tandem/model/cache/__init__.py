"""The KV cache on the device: its arrays, how they are written, and how models see it."""

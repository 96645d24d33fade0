"""The device side of learning: gradients of adapters on the served model's own weights."""

"""LoRA adapters of a batch: kernels and plain products for them, routes of rows to slots, and the slots themselves."""

"""The KV cache on the drive, below the block pool: blocks come back byte for byte or not at all. No arrays here."""

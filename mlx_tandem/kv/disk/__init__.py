"""The KV cache on the drive, a tier below the block pool: blocks come back byte for byte or not at all. No arrays
here.
"""

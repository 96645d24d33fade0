"""KV blocks on the drive, under the pool: bytes that are exactly right or not used. No arrays here."""

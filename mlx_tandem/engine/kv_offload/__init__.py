"""KV offload: which blocks go to the drive, and which come from it for which sequence."""

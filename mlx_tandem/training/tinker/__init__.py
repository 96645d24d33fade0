"""Training and sampling for clients of Tinker's API: sessions with leases, models, samplers, checkpoints, promises."""

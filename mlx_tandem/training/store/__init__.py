"""Storage of learning on the drive: a database of trajectories and updates, and folders of checkpoints."""

"""What learning keeps on the drive: a database of trajectories and updates, and folders of checkpoints."""

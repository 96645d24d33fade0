"""What learning keeps on the drive: the journal of trajectories and updates, and checkpoints."""

"""Learning from environments of Atropos: a trainer for its trajectory API."""

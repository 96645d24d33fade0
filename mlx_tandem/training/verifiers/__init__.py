"""Learning from environments of verifiers, which play in a process of their own against this server."""

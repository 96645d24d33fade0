"""Learning while serving: the online learner of a server, the recorder of its traffic, and the jobs of clients."""

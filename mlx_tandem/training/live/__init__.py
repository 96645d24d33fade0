"""Learning beside serving: the online learner of one server, the recorder of live traffic, and jobs of clients."""

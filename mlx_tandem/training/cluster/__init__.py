"""Several machines with one base model: a leader, followers that serve what it serves, and a trainer elsewhere."""

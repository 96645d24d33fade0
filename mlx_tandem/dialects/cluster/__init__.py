"""This project's own dialect for several machines: what a leader says to followers and to a trainer."""

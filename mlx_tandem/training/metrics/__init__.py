"""Metrics and samples of learning, written to a JSONL file and to experiment trackers by writers with one protocol."""

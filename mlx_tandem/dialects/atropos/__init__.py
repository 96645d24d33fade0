"""Atropos' trajectory API, for environments that post to this server."""

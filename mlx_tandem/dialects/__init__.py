"""HTTP vocabularies over the same engine."""

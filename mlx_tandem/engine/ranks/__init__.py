"""Several ranks that compute one model: the first leads, the others do the same steps in the same order."""

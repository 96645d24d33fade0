"""`tandem bench`: a running server over HTTP, and the engine without it."""

"""`tandem bench`: measures a running server over HTTP, or the engine without a server."""

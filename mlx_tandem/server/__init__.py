"""The HTTP server: it reads requests of all dialects, runs them on the front, and sends the replies."""

"""The HTTP dialects: the routes, bodies and replies of each API that the server speaks, over the same engine."""

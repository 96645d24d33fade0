"""Requests in, tokens out: the scheduler decides, a runner executes, the core turns the loop, the client asks."""

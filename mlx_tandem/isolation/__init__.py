"""Worker processes for work that may take too much time or memory: the kernel ends them, and nothing else suffers."""

"""Worker processes for work that may take too much time or memory: the kernel ends such a process, and nothing else
suffers.
"""

"""Engines on many GPUs and machines, through Ray: each in a process of its own, one driver that hands out work."""

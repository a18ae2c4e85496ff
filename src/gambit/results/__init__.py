"""Votes, token counts, and the result of a search from its events."""

"""Thought-level beam search for reasoning LLMs."""

"""Gambit inside stock vLLM: its worker scores, its scheduler evicts; the only folder that imports vLLM."""

"""Everything that touches vLLM's own classes; `names.py` lists what is used of them, by version."""

"""Everything that touches vLLM's own classes; `scripts/vllm_touched.py` lists what is used of them, by version."""

"""The vLLM engine: its worker scores thoughts, its scheduler evicts by score; only `compat` imports vLLM."""

"""The embedded engine: any Hugging Face causal LM through transformers, on CPU, CUDA or MPS."""

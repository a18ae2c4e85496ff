"""Forest attention: traces that share a prefix read its keys and values once. The plan of a step, and its kernels."""

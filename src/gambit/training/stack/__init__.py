"""Several judges as one: their features at a moment of a search, and the line through them."""

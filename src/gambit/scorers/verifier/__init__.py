"""A verifier of one's own: the generator's weights with a LoRA adapter and a head, which reads a trace's text again."""

"""Training of scorers from sampled traces: collecting states, fitting, evaluating."""

"""From sampled traces to a scorer: collecting states, fitting, judging."""

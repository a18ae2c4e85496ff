"""Everything that makes a scorer: traces and states to disk, fitting, judging; never searches."""

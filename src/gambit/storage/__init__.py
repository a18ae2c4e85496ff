"""Files: run folders, problems, locks, hashes, the cache folder."""

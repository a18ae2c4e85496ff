"""Training data from what searches leave behind: their event logs."""

"""Plans made before anything runs: which layout for which machine, and what to rent."""

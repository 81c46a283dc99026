"""Plans made before anything runs: a layout for each machine, and instances to rent."""

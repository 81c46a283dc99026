"""One file a command: each parses its flags, builds objects, prints, and does nothing else."""

"""Plans made before anything runs: which layout for which machine. Pure: no files, clocks or sockets."""

"""The reverse proxy: one of the scheduler's two drivers, on real sockets."""

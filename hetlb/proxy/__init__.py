"""The reverse proxy: a driver of the scheduler on real sockets."""

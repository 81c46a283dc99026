"""Connections to engines, and requests of the proxy's own."""

"""Connections to engines, and what is asked of them beside requests."""

"""Takeover: a process takes the place of another."""

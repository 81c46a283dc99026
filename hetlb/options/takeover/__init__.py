"""A process that takes the place of another."""

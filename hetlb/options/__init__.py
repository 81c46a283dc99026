"""Options of `serve`: a folder each, imported where a fleet uses it."""

"""Options of `serve` and `pick`: a folder each, imported where a fleet uses it."""

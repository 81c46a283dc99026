"""Options of `serve` and `pick`: a folder each, imported only if a fleet uses it."""

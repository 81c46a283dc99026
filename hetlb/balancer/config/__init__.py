"""Configuration files: one reader of YAML, one module per kind of file."""

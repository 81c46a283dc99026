"""Files and addresses that people write: YAML, URLs, and errors that name key, value and expectation."""

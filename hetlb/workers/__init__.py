"""`hetlb serve --workers N`: processes that share the port, the fleet's load and what they know of it."""

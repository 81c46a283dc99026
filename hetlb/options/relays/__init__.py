"""`hetlb serve --workers N`: one scheduler process, N relays that share the port, a supervisor."""

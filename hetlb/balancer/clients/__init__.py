"""Clients: from their bytes to a request, and the head of its answer."""

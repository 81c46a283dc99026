"""Scheduling over pipelines of layers: stages, links, a path for every request."""

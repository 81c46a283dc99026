"""Policies: which instance serves a request. `hetlb` is the default; options have the others."""

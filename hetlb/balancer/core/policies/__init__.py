"""Policies: which instance serves a request. `hetlb` is the default, `baselines` the others."""

"""Policies: which instance serves a request. `least_delay` is the default, `baselines` the others."""

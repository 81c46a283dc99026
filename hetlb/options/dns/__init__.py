"""Instances by DNS names."""

"""Policies beside the default: baselines to compare with, and the base class for other packages."""

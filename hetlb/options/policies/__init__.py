"""Policies beside the default: those to compare with, and the base of those of other packages."""

"""Instances by files of a folder."""

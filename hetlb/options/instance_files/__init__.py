"""Instances by files beside the fleet file."""

"""Layers of one model placed on machines none of which holds all of it."""

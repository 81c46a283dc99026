"""Layers of one model on machines that each hold a part of it."""

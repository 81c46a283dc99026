"""Limits of API keys."""

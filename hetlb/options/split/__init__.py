"""Prefill at one instance, decode at another."""

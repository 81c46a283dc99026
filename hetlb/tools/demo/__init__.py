"""Data of `hetlb demo`: profiles of two emulated engines of unequal speed, a small sample of a real trace.

The demo needs nothing but the installed package. README.md names the sources of the data.
"""

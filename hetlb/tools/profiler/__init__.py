"""Latency profiles: measured or estimated points, and the constants fitted to them.

A fit is judged by the error on points it has not seen, never by R2.
"""

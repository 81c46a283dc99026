"""The load-test harness: open-loop load against any OpenAI-compatible server, and its results.

Importing this package imports no module: `hetlb simulate` prints tables without loading an HTTP client.
"""

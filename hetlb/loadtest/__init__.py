"""The load-test harness: open-loop load against any OpenAI-compatible server (`generator`), and tables.

Importing this package imports neither: `hetlb simulate` prints tables without loading an HTTP client.
"""

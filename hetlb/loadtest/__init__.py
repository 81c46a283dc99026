"""The load-test harness: open-loop load against any OpenAI-compatible server, and what is made of it.

What is asked and when: `hetlb.workload`; as requests: `bodies` (and `prompts`, for the demo's bare lengths).
Sending and measuring: `generator`, `response_parser`, `verdict`, `metrics`. Repeating: `runs`, `campaign`,
`compare`, `search`, `admin`. Showing: `report`, `progress`, `results`, `htmlreport` (over `curves`).

Importing this package imports none of them: `hetlb simulate` prints tables without loading an HTTP client.
"""

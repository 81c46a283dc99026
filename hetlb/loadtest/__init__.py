"""The load-test harness: open-loop load against any OpenAI-compatible server, and what is made of it.

What is asked and when: `hetlb.workload`; as requests: `bodies` (and `prompts`, for the demo's bare lengths).
Sending and measuring: `generator`, `answers`, `verdict`, `figures`. Repeating: `runs`, `campaign`, `compare`,
`search`, `admin`. Showing: `report`, `screen`, `results`, `htmlreport` (over `pictures` and `svg`).

Importing this package imports none of them: `hetlb simulate` prints tables without loading an HTTP client.
"""

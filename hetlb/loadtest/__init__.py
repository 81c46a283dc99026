"""The load-test harness: open-loop load against any OpenAI-compatible server, and what is made of it.

What is asked and when: `hetlb.workload`; as requests: `bodies`.
Sending and measuring: `generator`, `response_parser`, `verdict`, `metrics`. Repeating: `runs`, `campaign`,
`compare`, `rate_search`, `fleet_admin`. Showing: `report`, `screen`, `results`, `htmlreport` (over `curves`).

Importing this package imports none of them: `hetlb simulate` prints tables without loading an HTTP client.
"""

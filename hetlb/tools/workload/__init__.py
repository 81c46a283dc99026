"""Workloads: requests and their times, for the simulator, the load generator and the planner.

Rows of requests: `traces` (CSV files), `datasets` (other files, random lengths). What their prompts share:
`content`. When they are due: `arrivals`.
"""

"""Event log: facts and decisions of the scheduler in a file, and a replay of them."""

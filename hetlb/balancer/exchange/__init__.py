"""One request from arrival to its outcome, and the drivers of the scheduler."""

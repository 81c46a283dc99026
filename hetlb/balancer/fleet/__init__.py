"""The running fleet: start, reload, shutdown, members, availability, the admin listener."""

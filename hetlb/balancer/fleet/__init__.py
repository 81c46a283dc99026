"""The running fleet: start, reload, members, probes' beliefs, admin, state."""

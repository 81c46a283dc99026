"""Several schedulers of one fleet tell each other their leases."""

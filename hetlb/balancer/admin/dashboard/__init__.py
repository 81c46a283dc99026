"""The dashboard of the admin listener: one page, live over one event stream."""

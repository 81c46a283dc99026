"""The dashboard of the admin listener: one page, live over one event stream.

Without listeners it computes nothing but one tuple per ended request; with listeners it computes
one snapshot a second for all of them. The page loads nothing from elsewhere.
"""

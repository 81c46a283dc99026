"""What all tests share: property tests judge results, never speed."""

from hypothesis import settings

settings.register_profile("hetlb", deadline=None)
settings.load_profile("hetlb")

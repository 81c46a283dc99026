"""Data of `hetlb demo`: two emulated engines of unequal speed and a small sample of a real trace."""

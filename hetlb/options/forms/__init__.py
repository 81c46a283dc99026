"""Requests that are forms (multipart/form-data), as of audio."""

from hetlb.options.forms.multipart import read_form as hook

__all__ = ["hook"]

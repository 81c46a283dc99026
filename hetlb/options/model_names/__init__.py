"""Names of models beside the engines' own: aliases and fallbacks."""

from hetlb.options.model_names.model_names import ModelNames

hook = ModelNames.of

__all__ = ["hook"]

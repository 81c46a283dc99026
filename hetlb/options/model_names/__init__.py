"""Names of models beside the engines' own: aliases and fallbacks."""

from hetlb.options.model_names.model_names import ModelNames, mistakes

hook = ModelNames.of

__all__ = ["hook", "mistakes"]

"""Output lengths predicted by a sample of them, or known as in a simulation; the tools import it too."""

from hetlb.options.length_samples.samples import LengthDistribution as hook

__all__ = ["hook"]

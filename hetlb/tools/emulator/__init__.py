"""`hetlb engine`: vLLM 0.32 without a model, timed by a profile and `hetlb.tools.sim.engine_model`."""

from hetlb.tools.emulator.emulated_engine import EmulatedEngine

__all__ = ["EmulatedEngine"]

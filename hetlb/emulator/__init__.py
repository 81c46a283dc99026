"""`hetlb engine`: vLLM 0.32 without a model, timed by a latency profile and `hetlb.sim.engine_model`."""

from hetlb.emulator.emulated_engine import EmulatedEngine

__all__ = ["EmulatedEngine"]

"""`hetlb engine`: a vLLM server without a model, timed by a latency profile.

The engine is `hetlb.sim.engine_model`, the same one that the simulator drives; this package gives it a clock
(`real_time`), endpoints (`api`), and the requests and answers of vLLM 0.32 (`generation`, `replies`).
"""

from hetlb.emulator.emulated_engine import EmulatedEngine

__all__ = ["EmulatedEngine"]

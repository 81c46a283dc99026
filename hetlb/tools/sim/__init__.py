"""Virtual time: a model of one engine, and the fleet simulator that drives many of them.

`sim.engine_model` knows no clock; the simulator drives it from a heap, the emulator from the event loop.
"""

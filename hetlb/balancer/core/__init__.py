"""The scheduler and its parts: pure, synchronous, standard library only (and a decorator for the compiler).

Nothing in this package opens a socket, reads a clock, logs or draws from a global random generator.
Facts and the current time go in, commands come out; the proxy and the simulator are its two drivers.
"""

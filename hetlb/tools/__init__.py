"""Commands beside `serve`: plans, profiles, simulation, load tests, emulated engines."""

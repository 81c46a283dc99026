"""Facts of models: weights, cache and degrees, by their `config.json`."""

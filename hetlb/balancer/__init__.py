"""The balancer: what every `hetlb serve` runs. It imports neither `options` nor `tools`."""

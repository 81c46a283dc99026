"""`hetlb pick`: the endpoint picker for Envoy and the Gateway API, another driver of the one scheduler."""

"""`hetlb pick`: the endpoint picker for Envoy and the Gateway API, another driver of the one scheduler."""

import os

# Otherwise grpcio writes a line to stderr for every handshake that fails.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

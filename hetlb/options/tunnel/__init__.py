"""WebSockets: an opaque tunnel after the handshake."""

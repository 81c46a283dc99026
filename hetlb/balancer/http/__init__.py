"""HTTP/1.1, server-sent events and the bodies of the OpenAI API; no sockets."""

"""Wake and sleep: instances that free their memory while no request is for them."""

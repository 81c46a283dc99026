"""Prefill at one instance, decode at another: decided in `hand_overs.py`, done in `kv_transfers.py`."""

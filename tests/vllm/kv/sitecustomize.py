"""Lets two vLLM servers that exchange KV share few cores: put this folder on their PYTHONPATH.

- vLLM's NIXL connector binds the worker's thread to the machine's last core, in every server alike; here it
  is left where the server was bound.
- NIXL's progress thread spins on a core of its own; here it is off: the engine makes progress between steps.
  Without that thread NIXL takes no locks, and vLLM's threads call it at once: it is told to.
- The Mooncake connector asks for the accelerator's index, which a CPU build of torch cannot answer; here it
  is 0.
"""

import importlib.abc
import os
import sys

_set_affinity = os.sched_setaffinity


def _sched_setaffinity(pid, cores):
    if "nixl" not in sys._getframe(1).f_code.co_filename:
        _set_affinity(pid, cores)


os.sched_setaffinity = _sched_setaffinity


class _OnImport(importlib.abc.MetaPathFinder):
    """Changes what is imported already when a connector is about to be."""

    def find_spec(self, name, path, target=None):
        if name.endswith(".nixl.base_worker"):
            from nixl._api import nixl_agent_config, nixl_thread_sync_t

            defaults = list(nixl_agent_config.__init__.__defaults__)
            names = nixl_agent_config.__init__.__code__.co_varnames[1 : 1 + len(defaults)]
            defaults[names.index("enable_prog_thread")] = False
            defaults[names.index("sync_mode")] = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            nixl_agent_config.__init__.__defaults__ = tuple(defaults)
        elif name.endswith(".mooncake.mooncake_connector"):
            import torch

            if not torch.accelerator.is_available():
                torch.accelerator.current_device_index = lambda: 0


sys.meta_path.insert(0, _OnImport())

"""`hetlb pick` and an Envoy that asks it, as one program: both end with it.

`python pick_envoy.py FLEET.yaml ENVOY PORT ADMIN_PORT ENGINE_PORTS` takes the shipped configuration of Envoy,
with one worker thread. Run by the Python whose hetlb it is.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "envoy"


def envoy_config(
    port: int, admin_port: int, pickers: list[int] | None, engines: list[int], shape: str = "static"
) -> dict[str, Any]:
    """The shipped configuration with these ports on the loopback address; `pickers` None: without one."""
    document: dict[str, Any] = yaml.safe_load((SHIPPED / f"{shape}.yaml").read_text())
    document["admin"]["address"]["socket_address"]["port_value"] = admin_port
    resources = document["static_resources"]
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = port
    if pickers is None:
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        del manager["http_filters"][0]
        resources["clusters"] = [each for each in resources["clusters"] if each["name"] != "picker"]
    for cluster in resources["clusters"]:
        ports = (pickers or []) if cluster["name"] == "picker" else engines
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}}}
            for each in ports
        ]
    return document


def main() -> int:
    """Start both and wait for the end of one."""
    fleet, envoy, port, admin_port, engines = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as stack:

        def start(*command: str, **more: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, text=True, **more)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        picker = start(sys.executable, "-m", "hetlb", "pick", "--config", fleet, stdout=subprocess.PIPE)
        assert picker.stdout is not None
        line = picker.stdout.readline()
        if "ready on" not in line:
            sys.exit(f"the picker did not start: {line}")
        picker_port = int(line.split("ready on ")[1].split()[0].rpartition(":")[2])
        ports = [int(each) for each in engines.split(",")]
        config = Path(fleet).with_name(f"envoy-{port}.yaml")
        config.write_text(yaml.safe_dump(envoy_config(int(port), int(admin_port), [picker_port], ports)))
        return start(envoy, "-c", str(config), "--concurrency", "1", "--disable-hot-restart").wait()


if __name__ == "__main__":
    sys.exit(main())

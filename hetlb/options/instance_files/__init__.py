"""Instances by files beside the fleet file."""

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import DiscoveryTable
from hetlb.options.instance_files.file_source import FileSource


def hook(fleet: Fleet, table: DiscoveryTable) -> list[FileSource]:
    """Return the source of `discovery.files`, none where it names the fleet file alone."""
    paths = [fleet.base / each for each in table.files]
    others = [each for each in paths if fleet.path is None or each.resolve() != fleet.path.resolve()]
    return [FileSource(others, table.poll_s)] if others else []

"""Which CPUs this node's threads get: near to its NICs, where [topology] pin asks for it."""

import logging
from pathlib import Path

from pdnode.config import Config
from pdnode.obs.log import event
from pdnode.topology.cpus import format_cpulist
from pdnode.topology.detect import detect, find_nic
from pdnode.topology.ncclxml import override, read_topology_file
from pdnode.topology.threads import Threads, allowed_cpus, place_host_threads

NO_THREADS = Threads(-1, ())
"""The kernel places all threads."""

_log = logging.getLogger(__name__)


def choose_threads(config: Config) -> Threads:
    """Reads /sys for some milliseconds. ConfigError if the topology file cannot be read."""
    if not config.topology.pin:
        return NO_THREADS
    host = detect()
    if config.topology.file:
        host = override(host, read_topology_file(Path(config.topology.file)))
    nics = [found for nic in config.fabric.nics if (found := find_nic(host, nic.name)) is not None]
    threads = place_host_threads(host, nics, allowed_cpus())
    event(
        _log, logging.WARNING if threads.problem else logging.INFO, "topology.pinned", "pinned",
        progress_cpu=threads.progress, worker_cpus=format_cpulist(threads.worker),
        problem=threads.problem,
    )  # fmt: skip
    return threads

"""All that shows this node to the outside, built together: metrics, warnings, events, snapshot, and
the actions of the admin surface.
"""

import logging
import time

from aiohttp import web

from pdnode import __version__
from pdnode.api.listener import ApiListener
from pdnode.config import Config
from pdnode.daemon.control import Control
from pdnode.daemon.figures import Figures
from pdnode.daemon.reload import ConfigSource, Reloader
from pdnode.daemon.service import NodeService
from pdnode.daemon.snapshots import Snapshots
from pdnode.daemon.watch import Watch
from pdnode.obs.events import EventRing
from pdnode.obs.metrics import Metrics
from pdnode.obs.records import Records
from pdnode.obs.warnings import Warnings
from pdnode.types import BootId


class Observation:
    """Works from the first moment on; `parts` get known as they come up."""

    def __init__(
        self, config: Config, service: NodeService, records: Records, *, boot: BootId
    ) -> None:
        self.warnings = Warnings(time.monotonic)
        self.parts = Figures(config, service, self.warnings, boot)
        self.metrics = Metrics(
            self.parts.read,
            model=config.model.name,
            version=__version__,
            vllm_names=config.metrics.vllm_names,
        )
        self.records = records
        self.events = EventRing()
        self.watch = Watch(self.parts, records, self.metrics)
        self.warnings.add_source(service.conditions)
        self.warnings.add_source(self.parts.conditions)
        self.warnings.add_source(
            lambda: () if self.parts.verifier is None else self.parts.verifier.conditions()
        )

    def control(self, source: ConfigSource, app: web.Application, listener: ApiListener) -> Control:
        """The admin surface's side of the node, over the application and listener of the API."""
        control = Control(self.parts, source, Reloader(self.parts, app, listener))
        snapshots = Snapshots(
            self.parts,
            self.watch,
            self.metrics,
            self.events,
            actions=control.actions,
        )
        control.encode_snapshot = snapshots.encode
        self.warnings.add_source(control.conditions)
        return control

    def keep_events(self) -> None:
        """From now on the log's events are kept for the snapshot and for `/admin/v1/events`."""
        logging.getLogger().addHandler(self.events)

    def close(self) -> None:
        logging.getLogger().removeHandler(self.events)

"""The compiled transfer core (C++ on libfabric, by dlopen). A test compares this with the module.

Threads: one progress thread per device group, from `add_group` to `close`. All methods may be
called from one Python thread (the asyncio loop's); they only queue commands or read atomics, never
wait for the network, and release nothing that is in use. Results come as events: `event_fd`
becomes readable, `take_events` returns them. Everything that touches libfabric objects runs on the
progress thread of its group.
"""

from collections.abc import Sequence
from typing import Final

class FabricError(Exception):
    """`operation: text (code) [provider]`."""

class LayerCounter:
    """Worker side of the counter page (engine/protocol.py gives its layout)."""

    def __init__(self, page_fd: int, wake_fds: Sequence[int]) -> None: ...
    def raise_layer(self) -> None:
        """Store value + 1, seq_cst fence, wake each group whose sleeping word is set."""
    @property
    def value(self) -> int: ...

class Event:
    """One event. Fields that a kind does not use are 0, −1 or empty."""

    kind: str  # one of EVENT_KINDS
    session: int
    pair: tuple[int, int]  # (local NIC, remote NIC)
    slot: int
    generation: int
    count: int
    transfer: int
    text: str
    pairs: list[tuple[int, int]]

EVENT_KINDS: Final[tuple[str, ...]]
"""
opened      session: its regions are registered; `descriptors(session)` may be read
carried     session: what carry() asked for is registered; text: why it could not be
connected   session, pair: the connection is established (MSG), or the address is known (RDM)
probed      session, pair: our probe write came back with success and the peer's probe arrived
lost        session, pair, text: the connection died; nothing is fenced by that alone
fenced      session, pair (−1, −1 for the whole session): closed; no byte of it can land any more
reached     slot, generation, count: the expected count is there (once per arm)
overshoot   slot, generation, count: more than expected arrived (at most once per arm)
drained     transfer: finished or stopped, no write outstanding, all came back with success
failed      transfer, text, pairs: a write came back with an error or could not be posted; no write
            of it is posted any more; comes at once, at most one `failed` or `drained` per transfer
settled     transfer, pairs (every one over which a write of it came back with an error): after
            failed: no write of it is outstanding any more (all came back, or their connections
            are closed): its source pages may be reused
"""

class Fabric:
    def __init__(
        self,
        library: str,
        provider: str,
        poll: str,
        window: int = 0,
        silence_s: float = 60.0,
        device_memory: bool = False,
    ) -> None:
        """dlopen `library` (absolute path, RTLD_LOCAL) and check its version (≥ 1.18).

        provider: "tcp" | "verbs" | "efa" | "tcp-rdm" (compared exactly with prov_name, never a
        fall-back). poll: "adaptive" | "busy". window: most writes in flight per connection, if
        below the provider's (0: that). silence_s: 1 to 3600; a connection with a write that has
        not come back for so long is lost. device_memory: for add_device_region; `verbs` or
        `efa`, libfabric ≥ 1.20. Raises FabricError in words.
        """
    @property
    def library_version(self) -> str: ...
    @property
    def limits(self) -> dict[str, int | str | bool]:
        """iov_limit, rma_iov_limit, max_message_bytes, cq_data_size, mr_mode, endpoint
        ("msg" | "rdm"), session_registration (fence needs registrations per session),
        posts_receives, delivery (what its completion means), window."""
    def devices(self) -> list[tuple[str, str, str, int]]:
        """What the provider lists, without opening anything: (name, PCI address as sysfs writes
        it, link "up" | "down", bits a second); "" and 0 where it does not say."""
    @property
    def event_fd(self) -> int: ...
    def take_events(self, most: int = 256) -> list[Event]: ...

    # devices
    def add_group(self, nics: Sequence[tuple[str, str]], cpu: int = -1) -> int:
        """Open a device group of (name, source address) NICs; starts its progress thread, pinned
        to `cpu` if ≥ 0. Runs the self-test (own pair of endpoints: known immediate with the top bit
        set, payload, delivery completion) on every NIC before it returns. NIC numbers count up over
        all groups. Blocks (start-up only). Returns the group number."""
    def wake_fd(self, group: int) -> int:
        """eventfd that wakes the group's progress thread; give it to the worker."""
    def listen(self, nic: int, address: str, port: int) -> int:
        """FI_EP_MSG: open the passive endpoint; returns the bound port (port 0: any). Waits for
        the group's thread."""
    def unlisten(self, nic: int) -> None:
        """Close what `listen` opened on this NIC; its connections stay, and those that have said
        nothing yet are ended. Waits for the group's thread. FabricError where they come faster."""
    def endpoint_name(self, session: int, nic: int) -> bytes:
        """FI_EP_RDM: the name of the endpoint this session opened on `nic` (after `opened`)."""
    def add_region(self, group: int, fd: int, size: int, page_bytes: int) -> int:
        """Map `fd` (a worker's region) and remember how to register it: pieces that are multiples
        of `page_bytes` and within the provider's limits (a registration, a NIC). Returns the
        region number. Where the provider pins, a helper thread registers and this waits for it,
        without the GIL. FabricError if the fabric is closed meanwhile."""
    def add_device_region(
        self, group: int, dmabuf: int, address: int, size: int, page_bytes: int, device: int
    ) -> int:
        """Memory of the CUDA device of this number that the caller has mapped at `address` and
        exported as a dma-buf, of which this keeps a copy. Registered by the dma-buf, never touched
        here. The caller unmaps it after remove_region. Not yet run on a device."""
    def remove_region(self, region: int) -> None:
        """Unmap. No session may have it any more."""
    def digest(
        self,
        region: int,
        layers: int,
        layer_stride: int,
        page_stride: int,
        offset: int,
        length: int,
        pages: Sequence[int],
    ) -> bytes:
        """xxh3-64 of `length` bytes from `offset` on of each page, in each layer: eight bytes
        each, little-endian, in the order of `pages`, the layers of a page together. The one call
        that any thread may make: it reads the mapping, without the GIL. FabricError if a page is
        outside the region."""
    def add_counter(self, page_fd: int) -> int:
        """After the groups: map a worker's counter page; every group watches it while a program
        needs it."""
    def remove_counter(self, counter: int) -> None: ...

    # sessions: all answers are events
    def open_session(
        self, session: int, nics: Sequence[int], writable: Sequence[int], token: bytes
    ) -> None:
        """Register `writable` regions plus a 4 KiB scratch page for this peer on their NICs →
        opened, or `lost` with pair (−1, −1) if a registration was refused. `token`: 16 to 46 bytes.
        Again for an open session: NICs whose pairs were fenced are registered anew → opened.
        MSG: connection requests that carry `token` are accepted for this session from now on (all
        other ones are rejected). RDM: an endpoint of its own per NIC."""
    def descriptors(self, session: int) -> list[tuple[int, list[tuple[int, int, int, int, int]]]]:
        """[(region or −1 for scratch, [(nic, offset, length, base, key)])], for the peer."""
    def carry(self, session: int, region: int, group: int) -> None:
        """A writable region of another group: register it for this session with the session's NICs
        of `group` as well, also where they are registered anew later → carried. What `group` has
        registered of it stays until the session ends (verbs: until remove_region)."""
    def connect(
        self, session: int, pair: tuple[int, int], endpoint: bytes, deadline_s: float
    ) -> None:
        """MSG: connect local NIC pair[0] to `host:port`; RDM: take the peer's endpoint name.
        → connected, or lost after `deadline_s`; the same deadline holds for the probe. A pair that
        was up must be fenced before it is connected again. NIC numbers are 0 to 63."""
    def set_remote(
        self, session: int, regions: Sequence[tuple[int, Sequence[tuple[int, int, int, int, int]]]]
    ) -> None:
        """The peer's descriptors: [(rank or −1, [(nic, offset, length, base, key)])], checked."""
    def probe(self, session: int, answer: bool = False) -> None:
        """Write 8 bytes with immediate slot 0 into the peer's scratch over every connected pair
        → probed, or lost after the deadline of `connect` (10 s where the peer connected).
        `answer`: only after the peer's probe has come, which proves that it knows our address."""
    def fence(self, session: int, pair: tuple[int, int] | None = None) -> None:
        """Close the connection(s), close the session's own registrations (of that NIC, or all),
        drop its queued immediates, fail its outstanding writes locally → fenced. Idempotent: each
        call is answered, for a session that is not open at once."""

    # target side
    def arm(self, slot: int, generation: int, session: int, expected: int) -> None:
        """Slot 1..4095, generation 0..255: count from now on; `expected` 0 reaches at once."""
    def disarm(self, slot: int) -> None:
        """The slot is free; later immediates of its generation are counted as late."""
    def counted(self, slot: int) -> int:
        """Page units that have arrived since `arm` (what came early included); 0 if not armed.
        Reads one atomic: for those who watch. Completion is the event `reached`."""

    # sender side
    def open_transfer(
        self,
        transfer: int,
        session: int,
        immediate: int,
        pair: tuple[int, int] | None = None,
    ) -> None:
        """`pair`: the one connection that may carry it; None: all of the session."""
    def submit(
        self,
        transfer: int,
        counter: int,
        base: int,
        layers: int,
        region: int,
        source_layer_stride: int,
        source_page_stride: int,
        source_offset: int,
        remote_rank: int,
        remote_layer_stride: int,
        remote_page_stride: int,
        remote_offset: int,
        length: int,
        whole_page: bool,
        spans: Sequence[tuple[int, int, int]],
        group: int = -1,
    ) -> None:
        """One layer program: layer l is due when counter ≥ base + l + 1 (counter −1: due now).
        `group`: whose NICs carry it; −1: those of the region's own. Another one registers the
        region first, where the provider wants that of a source.
        spans are (source page, destination page, count). Bounds are checked against both regions
        before anything is queued (FabricError names what is outside)."""
    def finish(self, transfer: int) -> None:
        """No further programs → drained once everything came back with success."""
    def stop(self, transfer: int) -> None:
        """Post nothing more; what is outstanding comes back → drained (or failed)."""
    def close_transfer(self, transfer: int) -> list[tuple[int, int, int, int, int, int, int]]:
        """Forget it (after drained or settled). Its record: (program batch, layer, raised_ns,
        posted_ns, done_ns, bytes, writes), CLOCK_MONOTONIC, one row per submit() and layer."""

    # readable at any time, without a lock
    def statistics(self) -> dict[str, int]:
        """Since start: turns, late_immediates, early_immediates, overshoots, rejected_connections,
        registrations, wakeups, posted_bytes, posted_writes, posted_pages, received_units; in flight
        now: writes, bytes, pages; sessions, connections, transfers; contexts of operations that
        are allocated."""
    def turns(self) -> list[int]:
        """Of each group's thread: how often it has looked at everything since its start."""
    def nic_statistics(self) -> list[dict[str, int | str]]:
        """Per NIC: nic, name, address, {posted,done,failed}_{bytes,writes,pages}, in flight now
        bytes, writes, pages, received_units; registered now: registered_bytes, registrations."""
    def peer_statistics(self) -> list[dict[str, int]]:
        """The same per pair: session, local_nic, remote_nic, …. Several pairs of a session on one
        local NIC: received_units are with the first of them."""
    def close(self) -> str:
        """Stop and join the threads, then close endpoints, regions and domains. Idempotent.
        Returns what the provider said of the first that it did not close, else nothing."""

def build_info() -> dict[str, str]:
    """Compiler, headers' libfabric version, sanitizer."""

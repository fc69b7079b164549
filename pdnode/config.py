"""The configuration: frozen records, one per TOML table. Parsing and validation are beside it.

Sizes in bytes, times in seconds, as the names say. Every key is in config.example.toml.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pdnode.peertls import PeerTls
from pdnode.types import Role, Verify, WhenNoPrefill

AUTO = 0
"""In memory: a size or count that the daemon chooses (`"auto"` in the file)."""

DEMO_MODEL_DIR = Path("models/smollm2-135m-instruct")
"""Under [node] cache_dir: what `pdnode model fetch smollm2` makes."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    id: str  # default: host name
    role: Role
    when_no_prefill: WhenNoPrefill = WhenNoPrefill.LOCAL  # decode only
    log_level: str = "info"
    log_format: str = "auto"  # auto | text | json
    shutdown_timeout_s: float = 240.0
    cache_dir: Path = Path("/var/cache/pdnode")
    admin_socket: Path = Path("/run/pdnode/admin.sock")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: Path  # a Hugging Face directory; "smollm2" means the one that `pdnode model fetch` made
    name: str  # as the API serves it; default: last component of the path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: str = "cpu"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16 (auto: float32 on CPU, else bfloat16)
    tp: int = 1  # worker processes that share the model
    threads: int = AUTO  # of each worker
    chunk_tokens: int = 512  # token budget of a pass; a multiple of page_tokens
    max_running: int = 64  # sequences in a pass
    max_waiting: int = 256  # requests that wait; one more is refused (429)
    max_restarts: int = 5  # in a row, inside the daemon
    start_timeout_s: float = 300.0
    stall_s: float = 60.0  # a pass without a finished layer for so long ends the engine
    dp: int = 1  # TP groups, each with the whole model and pages of its own
    gpus: tuple[str, ...] = ()  # of the workers, group by group; empty: the first
    cuda_graphs: bool = True
    device_reason: str = ""  # why it is this device; no key, set once the host was looked at


@dataclass(frozen=True, slots=True)
class KvConfig:
    page_tokens: int = AUTO  # 16 on CPU, 64 on CUDA
    pool_bytes: int = AUTO
    dtype: str = "auto"  # auto: as [engine] dtype
    max_quarantined_ratio: float = 0.5  # of the pool; above it nothing is admitted
    canary_pages: int = 0  # decode only
    region: str = "auto"  # or a RegionKind


@dataclass(frozen=True, slots=True)
class NicConfig:
    name: str  # interface or device, or an address
    address: str  # source address of this NIC
    listen: str  # prefill: bind address; default: address
    advertise: str  # prefill: what peers connect to; default: listen
    group: int = 0  # device group: NICs with a progress thread of their own, for some ranks


@dataclass(frozen=True, slots=True)
class FabricConfig:
    provider: str = "tcp"  # tcp | verbs | efa
    library: str = "auto"  # absolute path of libfabric.so.1
    port: int = 7701  # prefill: listening fabric port of every NIC; 0: any
    poll: str = "adaptive"  # adaptive | busy
    nics: tuple[NicConfig, ...] = ()
    # Device group of each rank where the host chose the NICs; no key. Empty: dealt in order.
    homes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopologyConfig:
    allow: tuple[str, ...] = ()  # patterns of NICs; empty: all
    deny: tuple[str, ...] = ()
    file: str = ""  # absolute path of a topology file; "": none
    pin: bool = False


@dataclass(frozen=True, slots=True)
class ApiConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 << 20
    max_connections: int = 4096
    keys_credential: str = ""  # where the API keys come from; "": everybody may
    keys: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class PeerConfig:
    host: str = "127.0.0.1"
    port: int = 7700
    token_credential: str = ""  # where the token comes from; "": there is none
    token: bytes | None = field(default=None, repr=False)  # None only on loopback
    tls_certificate: str = ""  # credentials; all three or none
    tls_key: str = ""
    tls_ca: str = ""
    tls_node_names: bool = False
    tls: PeerTls | None = field(default=None, repr=False)
    heartbeat_s: float = 0.5
    link_lost_s: float = 3.0
    stall_s: float = 3.0
    drained_timeout_s: float = 10.0
    request_stall_s: float = 30.0
    connect_timeout_s: float = 5.0
    reconnect_max_s: float = 5.0
    nic_retry_s: float = 30.0
    nic_retry_max_s: float = 300.0
    max_peers: int = 64
    verify: Verify = Verify.OFF  # decode only


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """One `[[prefill]]` table of a decode node: where a prefill peer's link listens."""

    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    vllm_names: bool = True


@dataclass(frozen=True, slots=True)
class Config:
    node: NodeConfig
    model: ModelConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    peer: PeerConfig = field(default_factory=PeerConfig)
    prefill: tuple[PrefillConfig, ...] = ()
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

"""Every key of the configuration file, once: the reader, the example and docs/config.md follow it.

Defaults stand here in the form of the file; the records of config.py repeat them in memory's form
and a test compares the two. `reload` says whether a running daemon can take a new value.
"""

from pdnode.configengine import ENGINE, KV
from pdnode.configkeys import Key, Table
from pdnode.configkinds import (
    AUTO_WORD,
    AbsolutePath,
    Address,
    Choice,
    Flag,
    Integer,
    IpAddress,
    Names,
    Number,
    Size,
    Text,
)
from pdnode.topology.groups import MAX_DEVICE_GROUPS

CONFIG_VERSION = 1
MAX_NICS = 32
MAX_PREFILL_PEERS = 64
MAX_SOCKET_PATH = 107  # sun_path of Linux without its final zero
DEMO_MODEL = "smollm2"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = (AUTO_WORD, "text", "json")
SERVING_PROVIDERS = ("tcp", "verbs", "efa")
TEST_PROVIDER = "tcp-rdm"


_NAME = Text(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", allowed="1..63 of A-Z a-z 0-9 . _ -")
_NAME_OR_NONE = Text(
    pattern=r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})?", allowed="1..63 of A-Z a-z 0-9 . _ -"
)
_CREDENTIAL = Text(pattern=r"[^\x00-\x20\x7f]*", allowed="a credential name or an absolute path")

NODE = Table(
    "node",
    "Who this node is and what it does.",
    (
        Key(
            "id",
            _NAME_OR_NONE,
            "",
            "Name of this node, unique in the deployment. Not set: the host name.",
            sample="prefill-1",
        ),
        Key(
            "role",
            Choice(("prefill", "decode", "colocated")),
            None,
            "prefill computes prompts for decode nodes; decode takes requests and generates; "
            "colocated does both alone.",
        ),
        Key(
            "when_no_prefill",
            Choice(("local", "refuse")),
            "local",
            "Decode only, when no prefill peer is usable: run the prompt here, or answer 503.",
        ),
        Key("log_level", Choice(LOG_LEVELS), "info", "Least level that is logged.", reload=True),
        Key(
            "log_format",
            Choice(LOG_FORMATS),
            AUTO_WORD,
            "auto: colour on a terminal, priority prefixes under journald, else key=value text.",
        ),
        Key(
            "shutdown_timeout_s",
            Number(0, 86400),
            240.0,
            "How long SIGTERM waits for accepted work and transfers before it forces the end.",
            reload=True,
        ),
        Key(
            "cache_dir",
            AbsolutePath(),
            "/var/cache/pdnode",
            "Where `pdnode model fetch` puts models.",
        ),
        Key(
            "admin_socket",
            AbsolutePath(most=MAX_SOCKET_PATH),
            "/run/pdnode/admin.sock",
            "Unix socket of the admin routes; its directory must exist.",
        ),
    ),
)

MODEL = Table(
    "model",
    "The one model that this node serves.",
    (
        Key(
            "path",
            AbsolutePath((DEMO_MODEL,)),
            None,
            'Directory in Hugging Face form, or "smollm2": the one that '
            "`pdnode model fetch smollm2` made under cache_dir.",
        ),
        Key(
            "name",
            Text(most=128),
            "",
            "Name in the API. Not set: the last component of the path.",
            sample="smollm2-135m-instruct",
        ),
    ),
)

FABRIC = Table(
    "fabric",
    "The transfer engine: libfabric and its NICs. The provider is never replaced by another one.",
    (
        Key(
            "provider",
            Choice((*SERVING_PROVIDERS, TEST_PROVIDER)),
            "tcp",
            "libfabric provider, the same on all peers. tcp-rdm is for tests and benchmarks only.",
        ),
        Key(
            "library",
            AbsolutePath((AUTO_WORD,)),
            AUTO_WORD,
            "libfabric.so.1, version 1.18 or newer. auto: EFA's, then the system's, then the "
            "Python package's.",
        ),
        Key(
            "port",
            Integer(0, 65535),
            7701,
            "Prefill with tcp or verbs: listening port of every NIC. 0: any free one.",
        ),
        Key(
            "poll",
            Choice(("adaptive", "busy")),
            "adaptive",
            "busy never sleeps: lowest latency, and it wants a free core for itself.",
        ),
    ),
)

NIC = Table(
    "fabric.nics",
    "One per NIC. None: loopback where every peer is on this host, else those that are near to the "
    "GPUs or, without one, all that are of use; `pdnode check-config --host` says which and why.",
    (
        Key("name", _NAME, None, "Network interface or RDMA device.", sample="lo"),
        Key(
            "address",
            IpAddress(),
            "",
            "Source address. Not set: the first address of the interface. efa needs none.",
            sample="127.0.0.1",
        ),
        Key(
            "listen",
            IpAddress(),
            "",
            "Prefill only: the address to bind. Not set: address.",
            sample="0.0.0.0",
        ),
        Key(
            "advertise",
            IpAddress(),
            "",
            "Prefill only: the address that peers connect to. Not set: listen, or address where "
            "listen is a wildcard.",
            sample="192.0.2.10",
        ),
        Key(
            "group",
            Integer(0, MAX_DEVICE_GROUPS - 1),
            0,
            "Device group: NICs with a progress thread of their own. Groups count from 0, at most "
            "one per rank of [engine] tp × dp. The ranks are dealt to them in order; memory of a "
            "rank is registered with its group's NICs only, or with those of the nearest other "
            "group while it has none left.",
        ),
    ),
    many=True,
    most=MAX_NICS,
)

TOPOLOGY = Table(
    "topology",
    "Which NICs and CPUs are near to what. `pdnode topology` shows what was found.",
    (
        Key(
            "allow",
            Names(),
            (),
            "Use only these NICs: device names, interfaces or PCI addresses, with * and ?. Empty: "
            "all that are up, of the fabric, and no management ports.",
        ),
        Key("deny", Names(), (), "Never use these NICs; outranks allow."),
        Key(
            "file",
            AbsolutePath(("",)),
            "",
            "Topology file in NCCL's XML, where /sys does not show what is near. Not set: /sys.",
            sample="/etc/pdnode/topology.xml",
        ),
        Key(
            "pin",
            Flag(),
            False,
            "Keep the transfer thread on one CPU near the NICs, and the worker on other cores of "
            "that node. Not for two nodes on one host.",
        ),
    ),
)

API = Table(
    "api",
    "The HTTP listener: OpenAI routes, probes, metrics. It has no TLS.",
    (
        Key("listen", Address(0), "127.0.0.1:8000", "Address to bind. Port 0: any free one."),
        Key(
            "max_body_bytes",
            Size(1 << 10, 1 << 30),
            "8MiB",
            "Largest request body; a larger one is refused with 413.",
            reload=True,
        ),
        Key(
            "max_connections",
            Integer(1, 1 << 20),
            4096,
            "Client connections at a time.",
            reload=True,
        ),
        Key(
            "keys_credential",
            _CREDENTIAL,
            "",
            "API keys, one a line: a file of this name in $CREDENTIALS_DIRECTORY, or an absolute "
            "path with mode 0600. Routes under /v1 then want one of them as Authorization: Bearer. "
            "Not set: everybody may use them.",
            reload=True,
            sample="/etc/pdnode/credentials/api-keys",
        ),
    ),
)

PEER = Table(
    "peer",
    "The peer link and its clocks. A prefill node listens, decode nodes connect.",
    (
        Key(
            "listen",
            Address(0),
            "127.0.0.1:7700",
            "Prefill only: address to bind for links. Port 0: any free one.",
        ),
        Key(
            "token_credential",
            _CREDENTIAL,
            "",
            "The secret that peers share: a file of this name in $CREDENTIALS_DIRECTORY, or an "
            "absolute path with mode 0600. Required unless every peer is on loopback.",
            reload=True,
            sample="peer-token",
        ),
        Key(
            "tls_certificate",
            _CREDENTIAL,
            "",
            "Mutual TLS 1.3 on the link: this node's certificate with its chain, in PEM; a name in "
            "$CREDENTIALS_DIRECTORY or an absolute path. A prefill node's must name the host of "
            "the [[prefill]] addresses. KV pages are not encrypted.",
            reload=True,
            sample="/etc/pdnode/tls/node.pem",
        ),
        Key(
            "tls_key",
            _CREDENTIAL,
            "",
            "Its private key, in PEM without a password; an absolute path has mode 0600.",
            reload=True,
            sample="/etc/pdnode/tls/node.key",
        ),
        Key(
            "tls_ca",
            _CREDENTIAL,
            "",
            "The certificates, in PEM, one of which has signed every peer's.",
            reload=True,
            sample="/etc/pdnode/tls/ca.pem",
        ),
        Key("tls_node_names", Flag(), False, "A certificate must name its node's id.", reload=True),
        Key("heartbeat_s", Number(0.05, 60), 0.5, "Time between two heartbeats."),
        Key("link_lost_s", Number(0.1, 600), 3.0, "A peer silent for so long is lost."),
        Key("stall_s", Number(0.1, 600), 3.0, "A NIC without progress for so long is lost."),
        Key(
            "drained_timeout_s",
            Number(0.1, 3600),
            10.0,
            "How long pages wait for the writer's word before the link is dropped and fenced.",
        ),
        Key(
            "request_stall_s",
            Number(0.1, 86400),
            30.0,
            "A request without progress for so long fails.",
            reload=True,
        ),
        Key("connect_timeout_s", Number(0.1, 600), 5.0, "Limit of every step of a connection."),
        Key("reconnect_max_s", Number(0.2, 3600), 5.0, "Longest pause between two attempts."),
        Key(
            "nic_retry_s",
            Number(0.1, 3600),
            30.0,
            "Decode only: how long a NIC that was lost stays out before it is tried again; doubles "
            "with each failure.",
        ),
        Key("nic_retry_max_s", Number(0.1, 86400), 300.0, "The longest that it gets by doubling."),
        Key("max_peers", Integer(1, 4096), 64, "Links at a time.", reload=True),
        Key(
            "verify",
            Choice(("off", "once", "twice")),
            "off",
            "Decode only: compare pages with digests of what the prefill node wrote, before the "
            "first token, and with twice also when the request ends. A difference fails the "
            "request. Host memory only.",
            reload=True,
        ),
    ),
)

PREFILL = Table(
    "prefill",
    "Used in the role decode, also after `pdnode role decode`: one per prefill node.",
    (
        Key(
            "name",
            _NAME_OR_NONE,
            "",
            "Name in logs, metrics and X-Pdnode-Prefill. Not set: the address.",
            reload=True,
            sample="prefill-1",
        ),
        Key(
            "address",
            Address(1),
            None,
            "Where that node's [peer] listen is reached.",
            reload=True,
            sample="127.0.0.1:7700",
        ),
    ),
    many=True,
    most=MAX_PREFILL_PEERS,
)

METRICS = Table(
    "metrics",
    "What /metrics shows.",
    (
        Key(
            "vllm_names",
            Flag(),
            True,
            "Also under the vllm: names that common dashboards query.",
        ),
    ),
)

TABLES = (NODE, MODEL, ENGINE, KV, FABRIC, NIC, TOPOLOGY, API, PEER, PREFILL, METRICS)
"""In the order of the file."""

"""What must hold between the values of a configuration. Pure: looks at nothing but the records.

A rule says which keys it reads and is skipped when one of them could not be read, so that one
mistake gives one problem. `CROSS_RULES` run on a parsed file, `NIC_RULES` again once the addresses
of the NICs have been looked up on the host (confighost.py), `DEVICE_RULES` once "auto" has become
a device (configdevice.py).
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdnode.config import Config
from pdnode.configkinds import HostPort
from pdnode.configschema import TEST_PROVIDER
from pdnode.errors import Problem
from pdnode.types import RegionKind, Role, Verify, WhenNoPrefill

GPU_REGIONS = (RegionKind.STAGED, RegionKind.CUMEM)
"""Kinds of `[kv] region` in the memory of GPUs, also where the engine runs on the CPU."""

DEVICE_PROVIDERS = ("verbs", "efa")
"""Those that may reach the memory of a GPU."""


class Listener(NamedTuple):
    where: str  # the key that names it
    address: HostPort


@dataclass(frozen=True, slots=True)
class Rule:
    reads: tuple[str, ...]
    check: Callable[[Config], Iterator[Problem]]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def peers_are_local(config: Config) -> bool:
    """Every peer that this node can have is on this host."""
    return is_loopback(config.peer.host) and all(is_loopback(peer.host) for peer in config.prefill)


def listeners(config: Config) -> list[Listener]:
    """What this role binds. Only a prefill node listens for links and on its NICs."""
    found = [Listener("api.listen", HostPort(config.api.host, config.api.port))]
    if config.node.role is Role.PREFILL:
        found.append(Listener("peer.listen", HostPort(config.peer.host, config.peer.port)))
        if config.fabric.provider in ("tcp", "verbs"):
            found += [
                Listener("fabric.port", HostPort(nic.listen, config.fabric.port))
                for nic in config.fabric.nics
                if nic.listen
            ]
    return found


def _collide(one: HostPort, other: HostPort) -> bool:
    same_host = one.host == other.host or is_wildcard(one.host) or is_wildcard(other.host)
    return one.port == other.port != 0 and same_host


def _ports(config: Config) -> Iterator[Problem]:
    found = listeners(config)
    for index, listener in enumerate(found):
        for earlier in found[:index]:
            if listener.where != earlier.where and _collide(listener.address, earlier.address):
                yield Problem(
                    listener.where,
                    f"port {listener.address.port} is also that of {earlier.where}; each listener "
                    "needs its own",
                )
                break


def _token(config: Config) -> Iterator[Problem]:
    if not peers_are_local(config) and not config.peer.token_credential:
        yield Problem(
            "peer.token_credential",
            "required, because a peer is not on loopback: name a credential or an absolute path",
        )


def _tls(config: Config) -> Iterator[Problem]:
    peer = config.peer
    given = {
        "tls_certificate": peer.tls_certificate,
        "tls_key": peer.tls_key,
        "tls_ca": peer.tls_ca,
    }
    missing = [name for name, value in given.items() if not value]
    if missing and len(missing) < len(given):
        text = f"required with the other two: {', '.join(given)} are given together"
        yield from (Problem(f"peer.{name}", text) for name in missing)
    if missing and peer.tls_node_names:
        yield Problem("peer.tls_node_names", f"needs {', '.join(given)}")


def _prefill_tables(config: Config) -> Iterator[Problem]:
    names = Counter(peer.name for peer in config.prefill)
    addresses = Counter((peer.host, peer.port) for peer in config.prefill)
    for index, peer in enumerate(config.prefill):
        if names[peer.name] > 1:
            yield Problem(f"prefill[{index}].name", f'"{peer.name}" is used more than once')
        if addresses[peer.host, peer.port] > 1:
            yield Problem(
                f"prefill[{index}].address", f"{peer.host}:{peer.port} is listed more than once"
            )


def _refuse_needs_prefill(config: Config) -> Iterator[Problem]:
    refuses = config.node.when_no_prefill is WhenNoPrefill.REFUSE
    if config.node.role is Role.DECODE and refuses and not config.prefill:
        yield Problem(
            "node.when_no_prefill",
            'a decode node with "refuse" needs at least one [[prefill]] table; use "local" to run '
            "prompts here",
        )


def page_tokens(config: Config) -> int:
    """[kv] page_tokens with "auto" resolved: what suits the device."""
    return config.kv.page_tokens or (64 if config.engine.device == "cuda" else 16)


def _chunks(config: Config) -> Iterator[Problem]:
    page = page_tokens(config)
    if config.engine.chunk_tokens % page:
        yield Problem(
            "engine.chunk_tokens",
            f"{config.engine.chunk_tokens} is not a multiple of kv.page_tokens, which is {page}",
        )


def dtypes(config: Config) -> tuple[str, str]:
    """(weights and activations, KV) with "auto" resolved: what suits the device; KV as weights."""
    short = config.engine.device == "cuda"
    weights = config.engine.dtype
    if weights == "auto":
        weights = "bfloat16" if short else "float32"
    return weights, weights if config.kv.dtype == "auto" else config.kv.dtype


def _cuda_dtypes(config: Config) -> Iterator[Problem]:
    """FlashInfer's kernels: 16 bits, and queries like keys."""
    if config.engine.device != "cuda":
        return
    weights, kv = dtypes(config)
    if weights == "float32":
        yield Problem("engine.dtype", '"cuda" needs "bfloat16" or "float16"')
    elif kv != weights:
        yield Problem("kv.dtype", f'"cuda" needs that of engine.dtype, which is "{weights}"')


def _cuda_region(config: Config) -> Iterator[Problem]:
    if config.engine.device == "cuda" and config.kv.region == RegionKind.MEMFD:
        yield Problem("kv.region", 'engine.device "cuda" needs "auto", "staged" or "cumem"')


def _gpus(config: Config) -> Iterator[Problem]:
    engine = config.engine
    if engine.gpus and len(engine.gpus) != engine.tp * engine.dp:
        yield Problem(
            "engine.gpus",
            f"{len(engine.gpus)} GPUs for {engine.tp * engine.dp} workers (tp × dp): name one each",
        )
    twice = [name for name, count in Counter(engine.gpus).items() if count > 1]
    if twice:
        yield Problem("engine.gpus", f'"{twice[0]}" is listed more than once')
    if engine.gpus and engine.device == "cpu" and config.kv.region not in GPU_REGIONS:
        yield Problem(
            "engine.gpus",
            'no worker uses a GPU where engine.device is "cpu"; remove it, or use "cuda" or "auto"',
        )


def _region(config: Config) -> Iterator[Problem]:
    provider = config.fabric.provider
    if config.kv.region == RegionKind.CUMEM:
        if config.node.role is not Role.COLOCATED and provider not in DEVICE_PROVIDERS:
            yield Problem(
                "kv.region",
                f'"cumem" needs fabric.provider {" or ".join(DEVICE_PROVIDERS)}, which is '
                f'"{provider}"; use "auto" or "staged"',
            )
        yield from reading_problems(config)


def reading_problems(config: Config) -> Iterator[Problem]:
    """What reads pages with the CPU, and so is not for pages in a GPU's memory alone."""
    text = 'pages in a GPU\'s memory cannot be read here; kv.region = "staged" can'
    if config.kv.canary_pages:
        yield Problem("kv.canary_pages", text)
    if config.peer.verify is not Verify.OFF:
        yield Problem("peer.verify", text)


def _heartbeat(config: Config) -> Iterator[Problem]:
    peer = config.peer
    if peer.link_lost_s < 2 * peer.heartbeat_s:
        yield Problem(
            "peer.link_lost_s",
            f"{peer.link_lost_s:g} must be at least twice peer.heartbeat_s, which is "
            f"{peer.heartbeat_s:g}, or a healthy peer is taken for lost",
        )


def _nics_listed(config: Config) -> Iterator[Problem]:
    names = Counter(nic.name for nic in config.fabric.nics)
    addresses = Counter(nic.address for nic in config.fabric.nics if nic.address)
    for index, nic in enumerate(config.fabric.nics):
        if names[nic.name] > 1:
            yield Problem(f"fabric.nics[{index}].name", f'"{nic.name}" is listed more than once')
        elif addresses[nic.address] > 1:
            yield Problem(
                f"fabric.nics[{index}].address", f"{nic.address} is listed more than once"
            )


def _device_groups(config: Config) -> Iterator[Problem]:
    found = {nic.group for nic in config.fabric.nics}
    ranks = config.engine.tp * config.engine.dp
    if found and max(found) >= ranks:
        yield Problem(
            "fabric.nics.group",
            f"{max(found)}: groups count from 0, and {ranks} ranks (engine.tp × engine.dp) have "
            f"at most {ranks}",
        )
    elif found and (missing := set(range(max(found))) - found):
        yield Problem("fabric.nics.group", f"no NIC is of group {min(missing)}")


def _nic_addresses(config: Config) -> Iterator[Problem]:
    remote = not peers_are_local(config)
    prefill = config.node.role is Role.PREFILL
    for index, nic in enumerate(config.fabric.nics):
        where = f"fabric.nics[{index}]"
        if nic.address and is_wildcard(nic.address):
            yield Problem(f"{where}.address", f"{nic.address} is no address of a NIC")
        if remote and not prefill and is_loopback(nic.address):
            yield Problem(
                f"{where}.address",
                f"{nic.address} is loopback, but a [[prefill]] address is on another host",
            )
        if not prefill and (nic.listen or nic.advertise):
            key = "listen" if nic.listen else "advertise"
            yield Problem(f"{where}.{key}", "only a prefill node listens; remove it")
        elif prefill and nic.advertise and is_wildcard(nic.advertise):
            yield Problem(
                f"{where}.advertise", f"{nic.advertise} can be bound, but no peer can connect to it"
            )
        elif prefill and remote and is_loopback(nic.advertise):
            yield Problem(
                f"{where}.advertise",
                f"{nic.advertise} is loopback, but peer.listen serves other hosts: advertise an "
                "address that they reach",
            )


def _provider(config: Config) -> Iterator[Problem]:
    if config.fabric.provider == TEST_PROVIDER:
        yield Problem(
            "fabric.provider",
            f'"{TEST_PROVIDER}" is for tests and benchmarks only; use "tcp", "verbs" or "efa"',
        )


TEST_PROVIDER_RULE = Rule(("fabric.provider",), _provider)
DEVICE_RULES = (
    Rule(("engine.chunk_tokens", "kv.page_tokens", "engine.device"), _chunks),
    Rule(("engine.device", "engine.dtype", "kv.dtype"), _cuda_dtypes),
    Rule(("engine.device", "kv.region"), _cuda_region),
)
NIC_RULES = (
    Rule(("fabric.nics",), _nics_listed),
    Rule(("fabric.nics", "engine.tp", "engine.dp"), _device_groups),
    Rule(("fabric.nics", "node.role", "peer.listen", "prefill"), _nic_addresses),
    Rule(
        ("api.listen", "peer.listen", "fabric.port", "fabric.nics", "fabric.provider", "node.role"),
        _ports,
    ),
)
CROSS_RULES = (
    Rule(("peer.listen", "peer.token_credential", "prefill"), _token),
    Rule(("peer.tls_certificate", "peer.tls_key", "peer.tls_ca", "peer.tls_node_names"), _tls),
    Rule(("prefill",), _prefill_tables),
    Rule(("node.role", "node.when_no_prefill", "prefill"), _refuse_needs_prefill),
    Rule(("engine.gpus", "engine.device", "engine.tp", "engine.dp", "kv.region"), _gpus),
    Rule(("kv.region", "kv.canary_pages", "peer.verify", "fabric.provider", "node.role"), _region),
    *DEVICE_RULES,
    Rule(("peer.heartbeat_s", "peer.link_lost_s"), _heartbeat),
    *NIC_RULES,
)


def broken(config: Config, rules: tuple[Rule, ...], unread: frozenset[str]) -> list[Problem]:
    """Problems that `rules` find; `unread` are the keys whose values are only placeholders."""
    return [
        problem
        for rule in rules
        if not unread.intersection(rule.reads)
        for problem in rule.check(config)
    ]

"""`pdnode fabric-test` between two namespaces: good rails, and three bad ones, each in its way."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdnode.bench.network import Rails, ip, rails
from pdnode.obs.fabric_report import FabricReport
from tests.support.admin import pdnode
from tests.support.nodes import clients, nodes
from tests.support.rails import NEEDS_ROOT
from tests.support.rails_nodes import pair_of

pytestmark = NEEDS_ROOT

GOOD, BLOCKED, SLOW, WRONG, SECOND = range(5)


@pytest.fixture
def hosts() -> Iterator[Rails]:
    with rails(5, mbit=400) as found:
        found.nics[SLOW].limit(80)
        yield found


def block(hosts: Rails, rail: int, port: int) -> None:
    """Packets to this port disappear, as a firewall would have it; other ports answer."""
    netns, there = hosts.netns, hosts.nics[rail].there
    ip("-n", netns, "rule", "add", "pref", "20", "lookup", "local")
    ip("-n", netns, "rule", "delete", "pref", "0")
    ip(
        "-n", netns, "rule", "add", "pref", "10", "iif", there, "ipproto", "tcp",
        "dport", str(port), "blackhole",
    )  # fmt: skip


async def test_each_fault_is_named_in_words_of_its_own(
    tiny_model: Path, tmp_path: Path, hosts: Rails
) -> None:
    prefill, decode = pair_of(tiny_model, tmp_path, hosts, nic_retry_s=300.0, nic_retry_max_s=300.0)
    wrong = hosts.nics[WRONG].address_there.rpartition(".")[0] + ".251"
    prefill.nics[WRONG]["advertise"] = wrong
    block(hosts, BLOCKED, prefill.ports[2])
    with nodes(prefill, decode) as (_, node):
        async with clients(decode) as (client,):
            await client.wait_ready(node)
            ran = await pdnode("fabric-test", "pf", "--socket", str(decode.admin), "--json")
            shown = await pdnode("fabric-test", "pf", "--socket", str(decode.admin))
            unknown = await pdnode("fabric-test", "other", "--socket", str(decode.admin))
            await client.wait_no_pages()
    assert ran.code == 69
    report = msgspec.json.decode(ran.out, type=FabricReport)
    assert not report.ok
    assert [pair.nic for pair in report.pairs] == [rail.here for rail in hosts.nics]
    for rail in (GOOD, SECOND):
        good = report.pairs[rail]
        assert good.words == ()
        assert good.completions
        assert good.immediates[0] == good.immediates[1] > 64
        assert good.address == hosts.nics[rail].address_here
        assert (good.mtu, good.peer_mtu) == (1500, 1500)
        assert good.figures is not None
        assert 0 < good.figures.latency_p50_s <= good.figures.latency_p99_s < 5
        assert good.figures.rate_bytes_per_s < 400e6 / 8 * 1.2, "the token bucket"
    (said,) = report.pairs[BLOCKED].words
    assert said.startswith(f"blocked port: {hosts.nics[BLOCKED].address_there} answers, but not on")
    (said,) = report.pairs[SLOW].words
    assert said.startswith("slow rail: ")
    (said,) = report.pairs[WRONG].words
    assert said.startswith(f"wrong address: no way from {hosts.nics[WRONG].address_here}")
    assert wrong in said
    assert "WRONG: slow rail" in shown.out
    assert unknown.code == 70
    assert "peer: one of pf" in unknown.err

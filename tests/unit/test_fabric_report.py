"""What `pdnode fabric-test` says in words."""

import msgspec
import pytest

from pdnode.obs.fabric_report import FabricReport, Figures, PairReport, as_lines, judged

GOOD = PairReport(
    nic="eth1", address="10.1.0.1", subnet="10.1.0.0/24", mtu=9000, gid="", peer_nic="eth5",
    peer_endpoint="10.1.0.2:7701", peer_mtu=9000, connected=True,
    figures=Figures(50e6, 40e-6, 90e-6), immediates=(64, 64), completions=True,
)  # fmt: skip


def report(*pairs: PairReport) -> FabricReport:
    limits: dict[str, int | str | bool] = {"endpoint": "msg"}
    return judged(FabricReport("pf", "tcp", "2.1", limits, 1e-4, pairs))


def words(**changes: object) -> tuple[str, ...]:
    """Of a pair beside two good ones."""
    others = [msgspec.structs.replace(GOOD, nic=f"eth{number}") for number in (2, 3)]
    found = report(*others, msgspec.structs.replace(GOOD, **changes))
    assert all(pair.words == () for pair in found.pairs[:2])
    assert found.ok is (found.pairs[2].words == ())
    return found.pairs[2].words


def test_nothing_is_said_of_good_pairs() -> None:
    assert words() == ()
    assert words(mtu=0, peer_mtu=1500) == (), "an MTU that is not known is not another one"
    assert words(figures=Figures(36e6, 1e-3, 1e-3)) == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"figures": Figures(34e6, 1e-5, 1e-5)}, "slow rail: 272 Mbit/s, where the others reach"),
        ({"peer_mtu": 1500}, "MTU 9000 of eth1 here, 1500 of eth5 there"),
        ({"immediates": (63, 64)}, "64 immediates were sent and 63 counted"),
        (
            {"completions": False, "figures": None, "cause": "not done within 15 s"},
            "small writes pass and large ones do not (not done within 15 s)",
        ),
        (
            {"completions": False, "figures": None, "cause": "died", "immediates": (0, 64)},
            "writes do not come back: died",
        ),
        ({"connected": False, "cause": "stalled"}, "carries nothing now: stalled"),
        ({"connected": False, "reach": "filtered"}, "blocked port: 10.1.0.2 answers, but not on"),
        ({"connected": False, "reach": "no_route"}, "wrong address: no way from 10.1.0.1"),
        ({"connected": False, "reach": "refused"}, "10.1.0.2 refuses connections to port 7701"),
        ({"connected": False, "reach": "silent"}, "10.1.0.2 does not answer at all"),
        (
            {"connected": False, "reach": "silent", "peer_endpoint": "10.9.9.9:7701"},
            "wrong address: no way from 10.1.0.1, which is in 10.1.0.0/24, to 10.9.9.9",
        ),
    ],
)
def test_each_fault_has_words_of_its_own(changes: dict[str, object], text: str) -> None:
    (said,) = words(**changes)
    assert said.startswith(text)


def test_lines_for_people() -> None:
    lines = as_lines(report(GOOD, msgspec.structs.replace(GOOD, nic="eth2", reach="refused")))
    assert lines[0] == "pf: tcp, libfabric 2.1, link round trip 0.10 ms"
    assert lines[2] == "eth1 – eth5: 10.1.0.1 – 10.1.0.2:7701, MTU 9000/9000"
    assert lines[3] == "  400 Mbit/s, 4 KiB in 40 µs (p99 90), immediates 64 of 64"
    assert lines[4] == "  good"
    assert lines[7].startswith("  WRONG: 10.1.0.2 refuses")

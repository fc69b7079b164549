"""What the screens say, line by line. `tests/data/console/*.txt` are whole pictures.

To write them anew: PDNODE_WRITE_GOLDEN=1 pytest tests/tui -k picture; then look at the difference.
"""

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
from pdnode_tui import mock
from pdnode_tui.lines import STYLES, Line, plain
from pdnode_tui.render import draw
from pdnode_tui.view import Prompt, Stale, View

from pdnode.obs.snapshot import Node, Snapshot

DATA = Path(__file__).parents[1] / "data" / "console"
SOURCE = "unix:/run/pdnode/admin.sock"
PICTURES = [
    ("flow-full", "degraded", View(), 100, 30),
    ("flow-reduced", "healthy", View(), 80, 24),
    ("flow-least", "degraded", View(), 60, 15),
    ("flow-wide", "healthy", View(), 160, 50),
    ("flow-colocated", "empty", View(), 100, 30),
    ("flow-stale", "healthy", View(stale=Stale(12.4, 4.0, 3, "Connection refused")), 100, 30),
    ("flow-ascii", "degraded", View(ascii=True), 80, 24),
    ("fabric", "degraded", View(screen="fabric", selected="mlx5_5"), 100, 30),
    ("topology", "degraded", View(screen="topology"), 80, 24),
    ("queues", "degraded", View(screen="queues", sort="tokens"), 100, 30),
    ("peers", "degraded", View(screen="peers", selected="pf-05"), 100, 30),
    ("events", "degraded", View(screen="events"), 80, 24),
    ("detail", "degraded", View(screen="detail", request="c04411ef", selected="40"), 100, 30),
    ("help", "healthy", View(screen="help"), 100, 30),
]


def picture(snapshot: Snapshot | None, view: View, width: int, height: int) -> list[str]:
    view = dataclasses.replace(view, source=SOURCE)
    return [plain(line) for line in draw(snapshot, view, width=width, height=height)]


@pytest.mark.parametrize(("name", "kind", "view", "width", "height"), PICTURES,
                         ids=[name for name, *_ in PICTURES])  # fmt: skip
def test_picture(name: str, kind: str, view: View, width: int, height: int) -> None:
    text = "\n".join(picture(mock.snapshot(kind), view, width, height)) + "\n"
    golden = DATA / f"{name}.txt"
    if "PDNODE_WRITE_GOLDEN" in os.environ:
        golden.write_text(text)
    assert text == golden.read_text()


def changed(kind: str, **fields: object) -> Snapshot:
    return msgspec.structs.replace(mock.snapshot(kind), **fields)


def test_figures_on_the_flow_screen_add_up() -> None:
    """Peers, transfers and NICs tell the same total, and a NIC that is down has no rate."""
    snapshot = mock.snapshot("degraded")
    lines = picture(snapshot, View(), 100, 30)
    total = sum(nic.rx_bytes_per_s or 0.0 for nic in snapshot.nics) * 8 / 1e9
    assert round(total) == 995
    assert any("total 995  36%" in line and "of 2800" in line for line in lines)
    down = next(line for line in lines if "mlx5_6" in line)
    assert down.rstrip("│!").split("│")[-1].split()[:5] == ["mlx5_6", "g6", "-", "-", "down"]


def test_not_available_is_a_dash_and_not_0() -> None:
    node = Node(id="n", boot="b", role="decode", state="serving", version="1", uptime_s=1.0)
    bare = changed("empty", node=node)
    text = picture(bare, View(), 100, 30)
    assert text[1].split()[:6] == ["run", "-", "wait", "-", "-", "tok/s"]
    assert "KV -" in text[1]
    zero = changed("healthy", transfers=(), transfers_inflight=0)
    assert any("KV IN FLIGHT  0 xfers" in line for line in picture(zero, View(), 100, 30))


def test_a_prefill_node_shows_what_it_sends() -> None:
    healthy = mock.snapshot("healthy")
    prefill = changed("healthy", node=msgspec.structs.replace(healthy.node, role="prefill"))
    lines = picture(prefill, View(), 100, 30)
    assert "FABRIC  tx Gb/s" in lines[3]
    assert " TO " in lines[4]
    assert "61,400 tok/s" in lines[1]  # prompt tokens are its trade


def test_a_decode_node_that_knows_no_layers_shows_pages_instead() -> None:
    [first, *_] = mock.snapshot("healthy").transfers
    one = msgspec.structs.replace(first, layer=None, layer_posted=None, pages_done=64.0)
    lines = picture(changed("healthy", transfers=(one,)), View(), 100, 30)
    assert lines[12].startswith("│ 03de88a1 ▕████████████░░░")
    assert lines[13].split()[1:4] == ["wire;", "layers", "are"]


def test_the_last_slow_transfer_stands_where_nothing_is_in_flight() -> None:
    lines = picture(changed("degraded", transfers=()), View(), 100, 30)
    assert "last slow: c04411ef from pf-02  418ms  21s ago" in lines[12]
    assert "layer 71 took longest: 13ms on the wire" in lines[13]


def test_without_a_line_rate_the_scale_is_the_peak_and_said_so() -> None:
    healthy = mock.snapshot("healthy")
    nics = tuple(msgspec.structs.replace(nic, line_bytes_per_s=None) for nic in healthy.nics)
    lines = picture(changed("healthy", nics=nics), View(screen="fabric"), 100, 30)
    assert any("top is 392 Gb/s, the peak: the line rate is not known" in line for line in lines)
    flow = picture(changed("healthy", nics=nics), View(), 100, 30)
    assert any("line rate not known" in line for line in flow)


def test_the_worst_warning_comes_first_and_the_rest_is_counted() -> None:
    lines = picture(mock.snapshot("degraded"), View(), 100, 30)
    assert lines[2].startswith(" ! W202 pf-05: lost: no frame for 3.0 s since 12:39")
    assert lines[2].endswith("+2 ")
    wide = picture(mock.snapshot("degraded"), View(), 200, 60)
    assert all(code in wide[2] for code in ("W202", "W204", "W117"))


def test_where_not_all_peers_fit_those_to_look_at_come_first() -> None:
    lines = picture(mock.snapshot("degraded"), View(), 80, 24)
    at = next(row for row, line in enumerate(lines) if "PEERS" in line) + 2
    assert [line.split()[1] for line in lines[at : at + 4]] == ["pf-02", "pf-05", "pf-01", "pf-03"]


def test_stale_says_for_how_long_and_when_it_tries_again() -> None:
    view = View(stale=Stale(12.4, 4.0, 3, "Connection refused"), source=SOURCE)
    snapshot = mock.snapshot("healthy")
    lines = draw(snapshot, view, width=100, height=30)
    text = [plain(line) for line in lines]
    assert "STALE 12s  reconnecting in 4 s (3)" in text[0]
    assert "- tok/s" in text[1]
    assert any("total -" in line for line in text)  # no rate is shown as if it were true
    assert "Connection refused" in text[-1]
    assert "D drain" not in text[-1]
    body = [style for line in lines[3:-2] for _, style in line]
    assert set(body) == {"dim"}


def test_a_daemon_of_another_version_is_shown_with_both_versions() -> None:
    lines = picture(changed("healthy", protocol=7), View(), 100, 30)
    assert lines[0].startswith(" pdnode  snapshot v7, console v1  node-a17")
    assert "snapshot v" not in picture(mock.snapshot("healthy"), View(), 100, 30)[0]


def test_never_an_empty_screen_before_the_first_answer() -> None:
    view = View(stale=Stale(3.0, 2.0, 2, "No such file or directory"), source=SOURCE)
    text = "\n".join(picture(None, view, 80, 24))
    assert f"No answer yet from {SOURCE}" in text
    assert "No such file or directory" in text
    assert "STALE 3.00s  reconnecting in 2 s (2)" in text


def test_find_keeps_the_rows_that_have_the_word() -> None:
    rows = picture(mock.snapshot("healthy"), View(find="PF-01"), 80, 24)[5:9]
    assert ["pf-01" in row for row in rows] == [True, True, False, False]
    assert "find “PF-01”" in picture(mock.snapshot("healthy"), View(find="PF-01"), 100, 30)[3]


def order(view: View, position: int) -> list[str]:
    words = [line.strip("│").lstrip("> ").split() for line in
             picture(mock.snapshot("degraded"), view, 100, 40)]  # fmt: skip
    return [row[position] for row in words if len(row) > position]


def test_sorting() -> None:
    rows = order(View(sort="rate"), 0)
    at = [rows.index(request) for request in ("03de88a1", "7f3a91c4", "b10c2f7e", "41d9c3aa")]
    assert at == sorted(at)
    peers = order(View(screen="peers", sort="state"), 0)
    assert next(p for p in peers if p.startswith("pf-")) == "pf-05"  # the lost one
    nics = order(View(screen="fabric", sort="rate"), 0)
    assert [n for n in nics if n.startswith("mlx5")][:3] == ["mlx5_0", "mlx5_2", "mlx5_1"]


def test_the_layers_of_a_slow_transfer_show_which_waited() -> None:
    lines = picture(mock.snapshot("degraded"), View(screen="detail", request="c04411ef"), 100, 60)
    rows = {line.strip("│").lstrip("> ").split()[0]: line for line in lines if "+" in line}
    assert rows["10"].split()[2:5] == ["51ms", "+3us", "+737us"]
    assert rows["11"].split()[2:5] == ["56ms", "+2.0ms", "+13ms"]


def test_a_request_that_is_over_says_where_to_look() -> None:
    lines = picture(mock.snapshot("healthy"), View(screen="detail", request="gone"), 100, 30)
    assert any("/admin/v1/requests and /admin/v1/transfers" in line for line in lines)


def test_only_actions_that_the_snapshot_lists_are_offered() -> None:
    def last(snapshot: Snapshot, view: View) -> str:
        return picture(snapshot, view, 100, 30)[-1]

    healthy = mock.snapshot("healthy")
    assert last(healthy, View()).split()[:4] == ["D", "drain", "X", "cancel"]
    assert last(changed("healthy", actions=()), View()).split()[0] == SOURCE
    assert last(mock.snapshot("empty"), View()).split()[0] == SOURCE  # refused while loading
    assert "read-only" in last(healthy, View(readonly=True))


def test_questions_stand_in_the_last_two_lines() -> None:
    prompt = Prompt("drain", "drain node-a17? Type the node's name:", "node-", "node-a17")
    lines = picture(mock.snapshot("healthy"), View(prompt=prompt), 80, 24)
    assert lines[-2].split()[:2] == ["drain", "node-a17?"]
    assert lines[-1].strip().startswith("node's name> node-_")
    yes_no = picture(mock.snapshot("healthy"), View(prompt=Prompt("cancel", "cancel x?")), 80, 24)
    assert [line.strip() for line in yes_no[-2:]] == ["cancel x?", "y: yes   n or esc: no"]


def test_all_styles_are_known() -> None:
    lines: list[Line] = []
    for kind in ("healthy", "degraded", "empty"):
        lines += draw(mock.snapshot(kind), View(), width=100, height=30)
    assert {style for line in lines for _, style in line} <= set(STYLES)

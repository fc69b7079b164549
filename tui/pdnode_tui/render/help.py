"""What the keys do, and how to read the figures."""

from pdnode_tui.lines import Line, fit
from pdnode_tui.table import Panel, frame

_TEXT = """\
1-6        flow, fabric, topology, queues and latency, peers, events
up down    move the choice, as do j and k; page up and down by ten, home and end
enter      open the chosen request; esc goes back
/          find; s sorts another way; p freezes the picture, sampling goes on
< >        slower, faster: 10 s to 0.2 s
z          reset the peaks; r records snapshots for --replay
D          drain or undrain this node: type its name
X          cancel the chosen request: y or n
q          quit

Rates are Gb/s, volumes GB of 1e9 bytes. Meters go from 0 to the line rate, not to the best
seen. "line" is the share of the line rate, "peak" the highest second since the start.
A row with ! explains a warning in line 3; docs/operations.md explains the codes.
"-" is not available, which is not 0. All of it: curl --unix-socket … /admin/v1/snapshot"""


def help_screen(width: int, height: int) -> list[Line]:
    inner = width - 2
    lines = [fit(((f" {text}", ""),), inner) for text in _TEXT.splitlines()[: height - 2]]
    lines += [fit((), inner)] * (height - 2 - len(lines))
    return frame([[Panel((("KEYS", "title"),), inner, lines)]])

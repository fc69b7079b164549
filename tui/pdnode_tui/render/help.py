"""What the keys do, and how to read the figures."""

from pdnode_tui.lines import Line, fit
from pdnode_tui.table import Panel, frame

_TEXT = """\
1-6        flow, fabric, topology, queues and latency, peers, events
up down    move the choice; also j k, page up, page down, home, end
enter      open the chosen request; esc goes back
/          find; s sorts another way
p          freeze the picture; sampling goes on
< >        slower, faster: 10 s to 0.2 s
z          reset the peaks; r records for --replay
D          drain or undrain this node: type its name
X          cancel the chosen request: y or n
R          another role: type it and the node's name
q          quit

Rates are Gb/s, volumes GB of 1e9 bytes. Meters go from 0 to the
line rate, not to the best seen. "line" is the share of it, "peak"
the highest second since the start. "-" is not available, not 0.
A row with ! explains a warning in line 3; docs/operations.md has
the codes. All of it as JSON: pdnode top --json"""


def help_screen(width: int, height: int) -> list[Line]:
    inner = width - 2
    lines = [fit(((f" {text}", ""),), inner) for text in _TEXT.splitlines()[: height - 2]]
    lines += [fit((), inner)] * (height - 2 - len(lines))
    return frame([[Panel((("KEYS", "title"),), inner, lines)]])

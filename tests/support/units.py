"""Where the unit files lie, and how the operations guide installs them."""

from pathlib import Path

UNITS = Path(__file__).resolve().parents[2] / "systemd"


def guide() -> list[str]:
    """The commands of docs/operations.md; the last one enables and starts the unit."""
    text = (UNITS.parent / "docs" / "operations.md").read_text().partition("**The units**")[2]
    return text.partition("```text\n")[2].partition("```")[0].splitlines()

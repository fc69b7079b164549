"""Where the unit files lie."""

from pathlib import Path

UNITS = Path(__file__).resolve().parents[2] / "systemd"

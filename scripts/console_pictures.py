"""Writes the pictures of the console in docs/img, as Textual exports them.

scripts/console_pictures.py                 top-*.svg, of a made-up node
scripts/console_pictures.py RECORDING       live-*.svg, of the last snapshot that r recorded
"""

import asyncio
import re
import sys
from pathlib import Path

from pdnode_tui.app import TopApp
from pdnode_tui.source import MockSource, ReplaySource, SourceEnded
from pdnode_tui.view import View

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "img"
FULL, SMALL = (100, 30), (80, 24)
MOCK = (
    ("top-flow", FULL, ()),
    ("top-small", SMALL, ()),
    ("top-fabric", FULL, ("2", "down", "down", "down", "down", "down")),
    ("top-detail", FULL, ("slash", "z", "z", "enter", "enter")),
)
LIVE = (("live-flow", FULL, ()), ("live-small", SMALL, ()))


class _Last(ReplaySource):
    """Only the last snapshot of a recording."""

    async def fetch(self) -> bytes:
        data = await super().fetch()
        try:
            while True:
                data = await super().fetch()
        except SourceEnded:
            return data


async def _picture(app: TopApp, size: tuple[int, int], keys: tuple[str, ...]) -> str:
    async with app.run_test(size=size) as pilot:
        while app.console_model.snapshot is None:
            await pilot.pause()
        await pilot.press(*keys)
        svg = app.export_screenshot()
    # The ids are random, and the fonts would be fetched from elsewhere.
    svg = re.sub(r"terminal-\d+-", "terminal-", svg)
    return re.sub(r" *@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def main(recording: Path | None) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, size, keys in MOCK if recording is None else LIVE:
        source = MockSource("degraded") if recording is None else _Last(recording)
        app = TopApp(source, View(source=source.name), folder=Path.cwd())
        (FOLDER / f"{name}.svg").write_text(asyncio.run(_picture(app, size, keys)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

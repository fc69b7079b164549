"""docs/protocol.md is the protocol of the code: messages, fields in their order, states, causes."""

import re
from typing import get_args

import msgspec
import pytest

from pdnode.api.peer import LINK_PATH
from pdnode.core import wire
from pdnode.core.auth import Step
from pdnode.core.link_state import State
from pdnode.core.transfer import FailCause
from tests.tidy.repository import ROOT

TEXT = (ROOT / "docs" / "protocol.md").read_text()
FRAMES: dict[str, type[msgspec.Struct]] = {
    kind.__struct_config__.tag: kind for kind in get_args(wire.Frame)
}
PARTS = {
    kind.__name__: kind
    for kind in (
        wire.Geometry, wire.NicAddress, wire.RegionDescriptor, wire.RegionPiece, wire.PageRun,
    )
}  # fmt: skip


def table(header: str) -> list[list[str]]:
    """Cells of the rows of the table that begins with `header`."""
    _, found, rest = TEXT.partition(f"\n{header}\n")
    assert found, f"no table {header}"
    rows = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_message_has_one_row() -> None:
    rows = [names(row[0])[0] for row in table("| message | sender | fields | meaning |")]
    assert sorted(rows) == sorted(FRAMES)


@pytest.mark.parametrize("tag", FRAMES)
def test_every_field_of_a_message_is_named_in_its_order(tag: str) -> None:
    [row] = [
        row for row in table("| message | sender | fields | meaning |") if row[0] == f"`{tag}`"
    ]
    assert names(row[2]) == list(FRAMES[tag].__struct_fields__)


def test_every_field_of_a_part_is_named_in_its_order() -> None:
    rows = {names(row[0])[0]: names(row[1]) for row in table("| part | fields | meaning |")}
    assert rows == {name: list(kind.__struct_fields__) for name, kind in PARTS.items()}


def test_every_state_and_cause_is_named() -> None:
    states = [names(row[0])[0] for row in table("| state | node | what it waits for |")]
    assert states == [state.value for state in State]
    causes = [names(row[0])[0] for row in table("| cause | meaning |")]
    assert causes == [cause.value for cause in FailCause]


def test_path_versions_bounds_and_label() -> None:
    assert f"`GET {LINK_PATH}`" in TEXT
    assert f"Versions spoken: {wire.PROTOCOL_MIN} to {wire.PROTOCOL_MAX}." in TEXT
    assert f"{wire.MAX_FRAME_BYTES:,} bytes" in TEXT
    assert f"{wire.NONCE_BYTES} fresh random bytes" in TEXT
    assert f"the {wire.SESSION_TOKEN_BYTES} random bytes" in TEXT
    assert all(f"`{step.value}`" in TEXT for step in Step)

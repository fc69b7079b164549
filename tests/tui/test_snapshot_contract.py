"""The snapshot is a contract: changes are additive, and old and new readers understand each other.

`tests/data/console/snapshot.json` is a document as protocol 1 wrote it, and `fields.json` names
every field with its type. Both may only grow.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pdnode_tui import mock

from pdnode.obs import snapshot as contract
from pdnode.obs.snapshot import PROTOCOL, Snapshot, decode, encode

DATA = Path(__file__).parents[1] / "data" / "console"


def fields() -> dict[str, dict[str, str]]:
    """Type of every field of every record, as JSON schema writes it."""
    schemas = msgspec.json.schema_components([Snapshot], ref_template="{name}")[1]
    return {
        name: {
            field: msgspec.json.encode(_shape(shape)).decode()
            for field, shape in schema["properties"].items()
        }
        for name, schema in schemas.items()
    }


def _shape(shape: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in shape.items() if key not in ("default", "description")}


def test_no_field_is_lost_or_retyped() -> None:
    golden = msgspec.json.decode((DATA / "fields.json").read_bytes())
    now = fields()
    changed = {
        f"{record}.{field}": (shape, now.get(record, {}).get(field))
        for record, shapes in golden.items()
        for field, shape in shapes.items()
        if now.get(record, {}).get(field) != shape
    }
    assert changed == {}, "a field of the contract was removed or got another type"


def test_every_field_is_written_down() -> None:
    """A new field goes into fields.json, so that the next change cannot lose it."""
    assert msgspec.json.decode((DATA / "fields.json").read_bytes()) == fields()


def test_a_document_of_protocol_1_is_understood_as_it_was() -> None:
    data = (DATA / "snapshot.json").read_bytes()
    snapshot = decode(data)
    assert snapshot == mock.snapshot("degraded")
    before, now = msgspec.json.decode(data), msgspec.json.decode(encode(snapshot))
    assert _subset(before, now)


def _subset(old: object, new: object) -> bool:
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            k in new and _subset(v, new[k]) for k, v in old.items()
        )
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(_subset, old, new))
    return old == new


def test_unknown_fields_of_a_newer_daemon_are_dropped() -> None:
    newer = msgspec.json.decode((DATA / "snapshot.json").read_bytes())
    newer["protocol"] = PROTOCOL + 1
    newer["novelty"] = {"x": 1}
    newer["node"]["novelty"] = [1, 2]
    snapshot = decode(msgspec.json.encode(newer))
    assert (snapshot.protocol, snapshot.node.id) == (PROTOCOL + 1, "node-a17")


def test_the_least_document_has_nothing_but_who_it_is() -> None:
    """What is not there is None or empty, never 0."""
    least = (
        b'{"protocol":1,"time_s":1.5,"ready":false,"model":{"name":"m"},"node":{"id":"n",'
        b'"boot":"b","role":"decode","state":"loading","version":"1","uptime_s":0.5}}'
    )
    snapshot = decode(least)
    assert (snapshot.pages, snapshot.summary, snapshot.latency) == (None, None, None)
    assert (snapshot.transfers_inflight, snapshot.nics, snapshot.actions) == (None, (), ())


@pytest.mark.parametrize("data", [b"", b"[]", b'{"protocol":1}', b"\xff"])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_records_are_frozen() -> None:
    assert not dataclasses.is_dataclass(Snapshot)
    with pytest.raises(AttributeError):
        mock.snapshot("healthy").ready = False  # type: ignore[misc]


def test_it_needs_nothing_of_the_project() -> None:
    script = f"import sys, {contract.__name__}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    ours = {name for name in done.stdout.split() if name.split(".")[0] == "pdnode"}
    assert ours == {"pdnode", "pdnode.obs", "pdnode.obs.snapshot"}

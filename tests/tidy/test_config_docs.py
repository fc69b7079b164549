"""config.example.toml and docs/config.md say what the schema says."""

import re
import subprocess
import sys
from pathlib import Path

import tomli

from pdnode.config import Config
from pdnode.configfile import load_settings
from pdnode.configparse import parse
from pdnode.configschema import TABLES
from tests.tidy.repository import ROOT

EXAMPLE = ROOT / "config.example.toml"


def test_both_are_what_the_schema_makes() -> None:
    result = subprocess.run(
        [sys.executable, "scripts/config_docs.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")


def test_example_names_every_key() -> None:
    """Also the ones that are commented out, each under its table."""
    found = set()
    table = ""
    for line in EXAMPLE.read_text().splitlines():
        if header := re.fullmatch(r"#?\[\[?([a-z.]+)\]?\]", line):
            table = header[1]
        elif key := re.match(r"#?([a-z_]+) = ", line):
            found.add(f"{table}.{key[1]}" if table else key[1])
    keys = {f"{table.name}.{key.name}" for table in TABLES for key in table.keys}
    assert found == keys | {"config_version"}


def test_example_is_valid_and_spells_the_defaults_out(tmp_path: Path) -> None:
    raw = tomli.loads(EXAMPLE.read_text())
    assert next(iter(raw)) == "config_version"
    config = parse(raw)
    assert isinstance(config, Config), config
    bare = {key: raw[key] for key in ("config_version", "prefill")}
    bare |= {"node": {"role": "decode"}, "model": {"path": "smollm2"}}
    assert parse(bare) == config
    (tmp_path / "config.json").write_text("{}")
    loaded = load_settings(EXAMPLE, overrides={"model.path": str(tmp_path)})
    assert loaded.config.model.path == tmp_path


def test_every_commented_key_is_valid_when_it_is_switched_on() -> None:
    text = re.sub(r"^#(?=\[|[a-z_]+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    raw = tomli.loads(text)
    raw["node"]["role"] = "prefill"  # the only role that takes listen and advertise of a NIC
    del raw["prefill"]
    config = parse(raw)
    assert isinstance(config, Config), config
    assert config.fabric.nics[0].advertise == "192.0.2.10"

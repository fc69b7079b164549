"""Writes config.example.toml and docs/config.md from the schema; with --check only compares."""

import sys
from pathlib import Path

from pdnode.configkeys import Key, Table
from pdnode.configkinds import shown
from pdnode.configschema import CONFIG_VERSION, TABLES, TEST_PROVIDER

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 98
EXAMPLE_VALUES = {"node.role": "decode", "model.path": "smollm2"}
"""Required keys have no default; the example shows a decode node beside its prefill node."""
EXAMPLE_TABLES = {"prefill"}
"""Arrays of tables that are written out; other ones are shown as comments."""

HEAD = f"""\
# pdnode configuration. Every key is here with its default; keys without one are commented out.
# `pdnode check-config --config FILE --print-effective` shows what takes effect, and from where.
# "reload" marks what `pdnode reload` takes over; a change of any other key needs a restart.

config_version = {CONFIG_VERSION}
"""

PAGE_HEAD = f"""\
# Configuration

Written by `make docs` from `pdnode/configschema.py`. One TOML file, and
`config_version = {CONFIG_VERSION}` comes first. Flags outrank the file, the file outranks the
defaults, and the environment gives nothing but the path (`PDNODE_CONFIG`).
`pdnode check-config --print-effective` shows the result and where each value is from. Sizes are
integers (bytes) or text with a binary unit, `"64GiB"`; times are in seconds. Secrets are never in
the file: a key that ends in `_credential` names one.

*Reload* says whether `pdnode reload` gives a new value to a running node; a change of any other key
needs a restart.
"""


def allowed(key: Key, table: Table) -> str:
    """What may be written, without the provider that serving refuses."""
    text = key.kind.allowed
    if f"{table.name}.{key.name}" == "fabric.provider":
        text = text.replace(f', "{TEST_PROVIDER}"', "")
    return text


def wrap(text: str, prefix: str) -> list[str]:
    lines, line = [], prefix
    for word in text.split():
        if len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = prefix
        line += f" {word}"
    return [*lines, line]


def example_key(key: Key, table: Table) -> list[str]:
    place = f"{table.name}.{key.name}"
    reload = " (reload)" if key.reload else ""
    lines = [*wrap(key.doc, "#"), *wrap(f"Allowed: {allowed(key, table)}{reload}", "#  ")]
    if place in EXAMPLE_VALUES:
        return [*lines, f"{key.name} = {shown(EXAMPLE_VALUES[place])}"]
    if key.default is None:
        return [*lines, f"{key.name} = {shown(key.sample)}"]
    if key.default == "":
        return [*lines, f"#{key.name} = {shown(key.sample)}"]
    return [*lines, f"{key.name} = {shown(key.default)}"]


def example() -> str:
    lines = [HEAD]
    for table in TABLES:
        header = f"[[{table.name}]]" if table.many else f"[{table.name}]"
        body = [header, *(line for key in table.keys for line in example_key(key, table))]
        if table.many and table.name not in EXAMPLE_TABLES:
            body = [line if line.startswith("#") else f"#{line}" for line in body]
        lines += [*wrap(table.doc, "#"), *body, ""]
    return "\n".join(lines)


def page() -> str:
    lines = [PAGE_HEAD]
    for table in TABLES:
        header = f"[[{table.name}]]" if table.many else f"[{table.name}]"
        lines += [f"## `{header}`", "", table.doc, ""]
        lines += ["| key | allowed | default | reload | meaning |", "|---|---|---|---|---|"]
        for key in table.keys:
            default = "not set" if key.default == "" else f"`{shown(key.default)}`"
            if key.default is None:
                default = "required"
            row = (f"`{key.name}`", allowed(key, table), default, "yes" if key.reload else "no")
            lines.append("| " + " | ".join((*row, key.doc)) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    stale = []
    for path, text in (
        (ROOT / "config.example.toml", example()),
        (ROOT / "docs" / "config.md", page()),
    ):
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        print(f"not what the schema says: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Every `pdnode` command and make target that the documents show exists, with its options.

Code blocks are parsed as they stand; of a command in a sentence the subcommand and its options must
exist. A block whose commands need hardware says so in a comment, and is parsed like any other.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode.cli import _parser
from tests.tidy.repository import ROOT, files, read

DOCUMENTS = [path for path in files() if path.suffix == ".md" and path.parts[0] != "tests"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "text")
INLINE = re.compile(r"`(pdnode [^`]+)`")
ENDS = {"|", "||", "&&", ";", "&", ">"}


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of each `pdnode …` line of the code blocks."""
    for language, block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language in SHELL else ():
            if re.match(r"\s*(sudo )?(\.venv/bin/)?pdnode [a-z]", line):
                words = shlex.split(line, comments=True)
                words = words[words.index(next(w for w in words if w.endswith("pdnode"))) + 1 :]
                ends = [at for at, word in enumerate(words) if word in ENDS]
                yield words[: ends[0]] if ends else words


def parses(words: list[str]) -> bool:
    try:
        _parser().parse_args(words)
    except SystemExit:
        return False
    return True


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def objection(command: str) -> str | None:
    """What of a command in a sentence does not exist. `drain | undrain` are two, CAPITALS any."""
    parser, words = _parser(), command.replace("|", " ").split()[1:]
    for word in words:
        if word in subcommands(parser):
            chosen = subcommands(parser)[word]
            parser = parser if "|" in command else chosen
        elif word.startswith("--"):
            if word.partition("=")[0] not in parser._option_string_actions:
                return f"{command}: no {word}"
        elif subcommands(parser) and re.fullmatch(r"[a-z-]+", word):
            return f"{command}: no command {word}"
    return None


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_commands_parse(path: Path) -> None:
    wrong = [shlex.join(words) for words in commands(read(path)) if not parses(words)]
    wrong += filter(None, map(objection, INLINE.findall(read(path))))
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_make_targets_exist(path: Path) -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", read(path), re.MULTILINE)
    assert sorted(set(shown) - made) == []


def test_finds_what_does_not_exist() -> None:
    text = "```toml\nx = 1\n```\n```sh\nmkdir x\npdnode top --mock full | cat   # seen\n"
    text += "sudo pdnode serve \\\n  --config a\n```\n"
    assert list(commands(text)) == [["top", "--mock", "full"], ["serve", "--config", "a"]]
    assert parses(["serve", "--config", "a"])
    assert not parses(["top", "--mock", "full"])
    assert objection("pdnode status | drain | undrain") is None
    assert objection("pdnode bench serve --nothing") == "pdnode bench serve --nothing: no --nothing"
    assert objection("pdnode rain") == "pdnode rain: no command rain"


RUN = {
    "README.md: make demo": "tests/e2e/test_demo.py: `pdnode demo`, which is all that it does",
    "README.md: pdnode model fetch smollm2": "tests/e2e/test_readme.py",
    "README.md: pdnode bench serve": "tests/e2e/test_readme.py, tests/e2e/test_bench_serve.py",
    "docs/operations.md: pip install --constraint": "scripts/dist.sh",
    "docs/operations.md: install -m 644": "tests/service/test_own_systemd.py",
    "docs/operations.md: curl -fsS": "tests/e2e/test_observe.py",
    "docs/performance.md: pdnode bench serve": "tests/e2e/test_bench_serve.py",
}
"""What runs the commands of a block, by the document and its first words."""
NOT_RUN = ("# needs hardware", "# run by no test")
PROGRAMS = r"(make|pdnode|pip|install|curl|nft|openssl|ssh|systemctl|docker|kubectl)\s"


def test_every_block_of_commands_is_run_or_says_that_it_is_not() -> None:
    seen = set()
    for path in DOCUMENTS:
        for language, block in BLOCK.findall(read(path)):
            lines = [line for line in block.splitlines() if line]
            first = next((line for line in lines if not line.startswith("#")), "")
            if language not in SHELL or not re.match(PROGRAMS, first):
                continue
            if lines[0] in NOT_RUN:
                continue
            known = [key for key in RUN if f"{path}: {first}".startswith(key)]
            assert len(known) == 1, f"{path}: {first}: nothing is known to run it"
            seen.add(known[0])
    assert seen == set(RUN)
    named = {
        name for text in RUN.values() for name in re.findall(r"[a-z]+/[\w/]+\.(?:py|sh)", text)
    }
    assert [name for name in named if not (ROOT / name).is_file()] == []

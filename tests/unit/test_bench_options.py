"""`pdnode bench serve`: what it refuses, and its defaults."""

import argparse
from pathlib import Path

import pytest

from pdnode.bench.compare import cores_for
from pdnode.bench.options import add_arguments, is_alone, is_loopback, options_of
from pdnode.cli import main
from pdnode.errors import Exit

URL = ("--url", "http://127.0.0.1:1")


def parse(*words: str, url: tuple[str, ...] = URL) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*url, *words])


def test_defaults_of_closed_and_open_loop() -> None:
    closed = options_of(parse())
    assert (closed.streams, closed.rate, closed.rounds, closed.urls) == (1, 0, 1, [URL[1]])
    opened = options_of(parse("--rate", "2.5"))
    assert (opened.streams, opened.rate) == (256, 2.5)
    assert options_of(parse("--rate", "2.5", "--streams", "3")).streams == 3


def test_rounds_are_for_a_comparison_and_never_more_than_requests() -> None:
    compare = ("--compare", "http://[::1]:2/v1/")
    assert options_of(parse(*compare)).rounds == 4
    assert options_of(parse(*compare)).urls == [URL[1], "http://[::1]:2"]
    assert options_of(parse(*compare, "--requests", "3")).rounds == 3


def test_compare_alone_has_defaults_of_its_own() -> None:
    args = parse("--compare", url=())
    assert is_alone(args)
    options = options_of(args)
    assert (options.prompt_tokens, options.background_streams, options.rounds) == (2000, 4, 4)
    assert (options.requests, options.output_tokens) == (2, 8)
    assert not is_alone(parse())
    given = options_of(parse("--compare", "--rounds", "7", "--prompt-tokens", "512", url=()))
    assert (given.rounds, given.prompt_tokens) == (7, 512)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("bench", "serve"), ("--url", "required")),
        (("bench", "serve", "--compare", *URL), ("--url", "not with --compare alone")),
        (("bench", "serve", "--compare", "--rate", "3"), ("--rate", "not with --compare alone")),
        (("bench", "serve", "--compare", "--cores", "3"), ("--cores", "an even number")),
        (("bench", "serve", *URL, "--chunk-tokens", "64"), ("--chunk-tokens", "only with")),
        (("bench", "serve", "--compare", "--chunk-tokens", "1"), ("'1'", "16 to 1048576")),
    ],
)
def test_compare_alone_takes_no_node_and_the_rest_needs_one(
    words: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--model-path", "/nowhere"] if "--compare" in words else [*words])
    assert ended.value.code == Exit.USAGE
    told = capsys.readouterr().err
    for part in parts:
        assert part in told


def test_cores_are_an_even_number_of_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 2, 7, 5, 9})
    assert cores_for(None) == [2, 4, 5, 7]
    assert cores_for(2) == [2, 4]
    for wrong in (3, 6):
        with pytest.raises(ValueError, match=f"--cores: {wrong} of 5"):
            cores_for(wrong)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--streams", "0"), ("--streams", "'0'", "1 to 4096")),
        (("--streams", "x"), ("--streams", "'x'", "1 to 4096")),
        (("--rate", "nan"), ("--rate", "0 to 10000")),
        (("--rate", "-1"), ("--rate", "0 to 10000")),
        (("--requests", "1000000"), ("--requests", "1 to 100000")),
        (("--output-tokens", "1.5"), ("--output-tokens", "1 to 65536")),
        (("--duration", "0"), ("--duration", "1 to 86400")),
        (("--compare", "10.0.0.1:80"), ("--compare", "http://host:port")),
        (("--compare", "http://10.0.0.1:80"), ("--compare", "not loopback", "--allow-remote")),
        (("--url", "http://example.org"), ("--url", "not loopback", "--allow-remote")),
    ],
)
def test_wrong_usage_names_the_option(
    words: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *URL, *words])
    assert ended.value.code == Exit.USAGE
    told = capsys.readouterr().err
    for part in parts:
        assert part in told


def test_remote_hosts_are_taken_when_allowed() -> None:
    options = options_of(parse("--compare", "https://10.0.0.1:80", "--allow-remote"))
    assert options.compare == "https://10.0.0.1:80"


@pytest.mark.parametrize(
    ("url", "yes"),
    [("http://127.9.9.9:1", True), ("http://localhost", True), ("http://[::1]:1", True),
     ("http://0.0.0.0:1", False), ("http://localhost.example", False)],
)  # fmt: skip
def test_what_is_loopback(url: str, yes: bool) -> None:
    assert is_loopback(url) == yes


def test_a_key_is_read_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-0123456789abcdef\n")
    path.chmod(0o600)
    options = options_of(parse("--api-key-file", str(path)))
    assert options.headers() == {"Authorization": "Bearer sk-0123456789abcdef"}
    assert "0123456789" not in repr(options)
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"--api-key-file: .*mode 0644"):
        options_of(parse("--api-key-file", str(path)))
    assert options_of(parse()).headers() == {}

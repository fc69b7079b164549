"""Arguments of `pdnode bench serve`: what they mean, their bounds, their defaults."""

import argparse
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pdnode.secretfile import SecretError, read_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run. With `rate` 0 the loop is closed: `streams` requests at any time."""

    url: str
    compare: str | None
    streams: int  # open loop: arrivals beyond so many in flight are not sent, and counted
    rate: float  # arrivals a second, Poisson
    requests: int  # to each target
    duration_s: float  # no request starts later; those under way may end
    timeout_s: float  # of one request
    prompt_tokens: int
    output_tokens: int
    background_streams: int
    background_prompt_tokens: int
    background_output_tokens: int
    idle_s: float  # background alone, before the load
    rounds: int  # with `compare`: how often the targets take turns
    seed: int
    model: str | None  # None: the first that the target serves
    vocabulary: int | None  # None: what the target says
    api_key_file: str | None = None  # the first key in it; never the key, for options are printed

    @property
    def urls(self) -> list[str]:
        return [self.url] if self.compare is None else [self.url, self.compare]

    def headers(self) -> dict[str, str]:
        """Of every request. SecretError where the file is no good."""
        if self.api_key_file is None:
            return {}
        return {"Authorization": f"Bearer {read_keys(self.api_key_file)[0].decode()}"}


def bounded(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {_plain(low)} to {_plain(high)}")
        return value

    return read


def add_numbers(parser: argparse.ArgumentParser, *rows: tuple[str, int, int, int, str]) -> None:
    """An option for each row: (name, least, most, default, what it is)."""
    for name, low, high, default, what in rows:
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=bounded(int, low, high),
            default=default,
            help=f"{what}, {low} to {high}; default: {default}",
        )


def _plain(number: float) -> str:
    """Without an exponent."""
    return str(int(number)) if number == int(number) else str(number)


def _base_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: http://host:port")
    return text.rstrip("/").removesuffix("/v1")


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_NUMBERS: tuple[tuple[str, type[int] | type[float], float, float, float | None, str], ...] = (
    ("streams", int, 1, 4096, None, "requests at a time (closed loop; default 1); with --rate at "
     "most so many (default 256)"),
    ("rate", float, 0, 10_000, 0, "requests a second at random (Poisson); 0: closed loop"),
    ("requests", int, 1, 100_000, 100, "to each target"),
    ("duration", float, 1, 86_400, 60, "seconds; no request starts later"),
    ("timeout", float, 1, 3600, 120, "seconds for one request"),
    ("prompt-tokens", int, 1, 1 << 20, 512, "random token ids"),
    ("output-tokens", int, 1, 1 << 16, 64, "exactly; end-of-text is ignored"),
    ("background-streams", int, 0, 1024, 0, "short streams that run all the time; their ITL while "
     "prompts arrive is compared with idle"),
    ("background-prompt-tokens", int, 1, 1 << 20, 32, "of each background stream"),
    ("background-output-tokens", int, 1, 1 << 16, 512, "of each before it starts again"),
    ("idle", float, 0, 600, 5, "seconds of background streams alone, before the load"),
    ("rounds", int, 1, 1000, 4, "with --compare: turns of each target"),
    ("seed", int, 0, (1 << 63) - 1, 0, "of prompts and arrivals"),
    ("vocabulary", int, 1, 1 << 24, None, "token ids are below it; default: what /v1/models says"),
)  # fmt: skip
_ALONE = {
    "prompt_tokens": 2000, "output_tokens": 8, "background_streams": 4, "requests": 2,
    "duration": 420,
}  # fmt: skip
"""Other defaults of --compare without a URL. `requests`: prompts beside the streams, a round.
`duration`: no round starts later, but the first."""
_NOT_ALONE = ("url", "model", "streams", "rate", "vocabulary", "api_key_file")
_ONLY_ALONE = ("model_path", "cores", "chunk_tokens", "dtype")
CHUNK_TOKENS, DTYPE = 128, "float32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=_base_url, metavar="URL", help="the node")
    parser.add_argument(
        "--compare",
        nargs="?",
        const=True,
        type=_base_url,
        metavar="URL",
        help="a second node, in turns with the first; without a URL, and without --url: start "
        "colocated nodes and a prefill and a decode node on this host, and compare these",
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first in /v1/models")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="its first line is sent as API key; mode 0600, as the node's own; default: none",
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="also hosts other than loopback"
    )
    for name, kind, low, high, default, text in _NUMBERS:
        shown = text if default is None else f"{text}; default: {default:g}"
        alone = _ALONE.get(name.replace("-", "_"))
        if alone is not None:
            shown += f" ({alone} with --compare alone)"
        parser.add_argument(f"--{name}", type=bounded(kind, low, high), metavar="N", help=shown)
    alone_only = parser.add_argument_group("with --compare alone")
    alone_only.add_argument(
        "--model-path", metavar="DIR", help="a Hugging Face directory; default: smollm2, fetched"
    )
    alone_only.add_argument(
        "--cores",
        type=bounded(int, 2, 4096),
        metavar="N",
        help="an even number; half of them prefill, half decode; default: all there are",
    )
    alone_only.add_argument(
        "--chunk-tokens",
        type=bounded(int, 16, 1 << 20),
        metavar="N",
        help="of the chunked colocated node, a multiple of 16; default: 128",
    )
    alone_only.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of weights and KV; default: float32"
    )


def is_alone(args: argparse.Namespace) -> bool:
    """Whether the nodes are to be started here. ValueError for what has no meaning then."""
    alone = args.compare is True
    for name in _NOT_ALONE if alone else _ONLY_ALONE:
        if getattr(args, name) is not None:
            option, which = name.replace("_", "-"), "not" if alone else "only"
            raise ValueError(f"--{option}: {which} with --compare alone, which starts the nodes")
    return alone


def options_of(args: argparse.Namespace) -> Options:
    """ValueError, naming the option, where they contradict each other. With `is_alone` no URL is in
    the result."""
    alone = is_alone(args)
    if args.url is None and not alone:
        raise ValueError("--url: required, but for --compare alone, which starts the nodes itself")
    compare = None if alone else args.compare
    for name, url in (("url", args.url), ("compare", compare)):
        if url is not None and not is_loopback(url) and not args.allow_remote:
            raise ValueError(f"--{name}: {url} is not loopback; allowed with --allow-remote")
    given = _numbers(args, alone=alone)
    streams = args.streams or (256 if given["rate"] else 1)
    rounds = int(given["rounds"]) if alone or compare else 1
    if compare:
        rounds = min(rounds, int(given["requests"]))
    key_file = args.api_key_file
    options = Options(
        url=args.url or "",
        compare=compare,
        streams=streams,
        rate=given["rate"],
        requests=int(given["requests"]),
        duration_s=given["duration"],
        timeout_s=given["timeout"],
        prompt_tokens=int(given["prompt_tokens"]),
        output_tokens=int(given["output_tokens"]),
        background_streams=int(given["background_streams"]),
        background_prompt_tokens=int(given["background_prompt_tokens"]),
        background_output_tokens=int(given["background_output_tokens"]),
        idle_s=given["idle"],
        rounds=rounds,
        seed=int(given["seed"]),
        model=args.model,
        vocabulary=args.vocabulary,
        api_key_file=None if key_file is None else str(Path(key_file).absolute()),
    )
    try:
        options.headers()
    except SecretError as error:
        raise ValueError(f"--api-key-file: {error}") from error
    return options


def _numbers(args: argparse.Namespace, *, alone: bool) -> dict[str, float]:
    """What is given or else the default, of all that have one."""
    found: dict[str, float] = {}
    for name, _, _, _, default, _ in _NUMBERS:
        key = name.replace("-", "_")
        if alone and key in _ALONE:
            default = _ALONE[key]
        value = getattr(args, key)
        if default is not None:
            found[key] = default if value is None else value
    return found

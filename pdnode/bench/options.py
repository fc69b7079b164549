"""Arguments of `pdnode bench serve`: what they mean, their bounds, their defaults."""

import argparse
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit


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

    @property
    def urls(self) -> list[str]:
        return [self.url] if self.compare is None else [self.url, self.compare]


def bounded(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {low:g} to {high:g}")
        return value

    return read


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=_base_url, required=True, metavar="URL", help="the node")
    parser.add_argument(
        "--compare", type=_base_url, metavar="URL", help="a second node, in turns with the first"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first in /v1/models")
    parser.add_argument(
        "--allow-remote", action="store_true", help="also hosts other than loopback"
    )
    for name, kind, low, high, default, text in _NUMBERS:
        shown = text if default is None else f"{text}; default: {default:g}"
        parser.add_argument(
            f"--{name}", type=bounded(kind, low, high), default=default, metavar="N", help=shown
        )


def options_of(args: argparse.Namespace) -> Options:
    """ValueError, naming the option, where they contradict each other."""
    for name in ("url", "compare"):
        url = getattr(args, name)
        if url is not None and not is_loopback(url) and not args.allow_remote:
            raise ValueError(f"--{name}: {url} is not loopback; allowed with --allow-remote")
    streams = args.streams or (256 if args.rate else 1)
    return Options(
        url=args.url,
        compare=args.compare,
        streams=streams,
        rate=args.rate,
        requests=args.requests,
        duration_s=args.duration,
        timeout_s=args.timeout,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        background_streams=args.background_streams,
        background_prompt_tokens=args.background_prompt_tokens,
        background_output_tokens=args.background_output_tokens,
        idle_s=args.idle,
        rounds=min(args.rounds, args.requests) if args.compare else 1,
        seed=args.seed,
        model=args.model,
        vocabulary=args.vocabulary,
    )

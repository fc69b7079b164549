"""Limits of the API listener that are not in the configuration, each with its reason."""

from dataclasses import dataclass

MAX_STOPS = 4  # as OpenAI's API
MAX_STOP_CHARACTERS = 256  # bounds what is searched and held back per token
MAX_STOP_TOKENS = 64
MAX_CHOICES = 8  # each is a generation of its own and waits in the queue beside all others
MAX_LOGPROBS = 20  # as OpenAI's chat API
MAX_BIASED_TOKENS = 1024
MAX_PENALTY = 2.0  # presence and frequency, as OpenAI's API, either sign
MAX_REPETITION_PENALTY = 10.0
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024  # text parts of one chat message
MAX_CHARACTERS_PER_TOKEN = 64
"""A prompt of more characters than this times the context is refused before it is tokenized: a
tokenizer needs about a second per megabyte, and no vocabulary averages 64 characters a token."""
MAX_INLINE_CHARACTERS = (
    2048  # longer texts are tokenized on a thread: a few ms at most block the loop
)
MAX_REQUEST_ID_CHARACTERS = 128
MAX_HEADER_LINE_BYTES = 8190
MAX_HEADER_FIELD_BYTES = 8190
MAX_HEADERS = 128
ACCEPT_BACKLOG = 256  # connections taken in one turn of the loop; the kernel queues the rest
DESCRIPTORS_FOR_CONNECTIONS = 0.5  # share of RLIMIT_NOFILE; the fabric and the links need the rest


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the listener waits for a client."""

    idle_s: float = 75.0  # for a complete request head; above the 60 s of common reverse proxies
    body_s: float = 30.0  # for the body once the head is there
    write_s: float = 30.0  # for a client that does not read its answer; pages are held meanwhile
    refused_s: float = 1.0  # how long a refused connection may take to read its 503

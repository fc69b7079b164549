"""W3C trace context: `traceparent` is taken from the client and passed on as it came. This node
makes no spans of its own; the trace id stands in the log lines of both nodes.
"""

import re

_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def checked_traceparent(header: str) -> str:
    """`header` where it is a version 00 trace context; else "", as if none had been sent."""
    return header if _TRACEPARENT.fullmatch(header) else ""


def trace_id(traceparent: str) -> str | None:
    """32 hex digits for a log line; None where there is none. Peers are not trusted either."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else None

"""Numbers as the console writes them. Rates are Gb/s as NICs are sold, volumes GB of 1e9 bytes.

Every function takes None as "not available" and writes `-` for it; none is longer than its
docstring says, so that columns can be fixed.
"""

import time

NOTHING = "-"


def gbits(bytes_per_s: float | None) -> str:
    """Gb/s in at most 5 characters: 344, 41, 4.1, 0.32."""
    if bytes_per_s is None:
        return NOTHING
    rate = bytes_per_s * 8 / 1e9
    if rate >= 99_999:
        return ">99k"
    if rate >= 9.95:
        return f"{rate:.0f}"
    if rate >= 0.995:
        return f"{rate:.1f}"
    if rate >= 0.005:
        return f"{rate:.2f}"
    return "0" if rate <= 0 else "<.01"


def duration(seconds: float | None) -> str:
    """A length of time in at most 6 characters: 412us, 9.8ms, 84ms, 1.31s, 94s, 3m20s, 3d04h."""
    if seconds is None:
        return NOTHING
    if seconds < 0:
        return f"-{duration(-seconds)}"[:6]
    if seconds < 0.000_999_5:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 0.009_95:
        return f"{seconds * 1e3:.1f}ms"
    if seconds < 0.999_5:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 99.5:
        return f"{seconds:.0f}s"
    minutes, hours, days = (round(seconds / unit) for unit in (60, 3600, 86400))
    if seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"
    if seconds < 86400:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    if days < 100:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{days}d" if days < 99_999 else ">99kd"


def volume(size_bytes: float | None) -> str:
    """Bytes in at most 7 characters: 6.0 GB, 512 MB."""
    if size_bytes is None:
        return NOTHING
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit * 0.9995:
            value = size_bytes / unit
            return f"{value:.1f} {name}" if value < 9.95 else f"{min(value, 9999):.0f} {name}"
    return f"{size_bytes:.0f} B"


def count(number: float | None) -> str:
    """A count in at most 7 characters: 2,914, 16,384, 1.2M."""
    if number is None:
        return NOTHING
    if number < 999_999.5:
        return f"{number:,.0f}"
    for unit, name in ((1e6, "M"), (1e9, "G"), (1e12, "T")):
        if number < unit * 999.5:
            return f"{number / unit:.1f}{name}"
    return ">999T"


def percent(ratio: float | None) -> str:
    """A share in at most 5 characters; 100 % only where it is all."""
    if ratio is None:
        return NOTHING
    shown = min(99, round(ratio * 100)) if ratio < 1 else round(ratio * 100)
    return f"{min(shown, 9999)}%"


def clock(time_s: float, *, seconds: bool = True) -> str:
    """Time of day, UTC: 12:41:07."""
    try:
        return time.strftime("%H:%M:%S" if seconds else "%H:%M", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        return "??:??:??" if seconds else "??:??"

"""Numbers as a person reads them."""

from __future__ import annotations


def bytes_text(count: int) -> str:
    """`538.1 MB`: decimal units, as disks and download pages count."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def count_text(count: int) -> str:
    """`135 M`, `1.54 B`: parameters."""
    if count >= 10**9:
        return f"{count / 1e9:.2f} B"
    if count >= 10**6:
        return f"{count / 1e6:.0f} M"
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """`1 round`, `1,024 rounds`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

"""Bytes in powers of two, and as text."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def byte_size(num_bytes: float) -> str:
    """Formats bytes with a suitable unit: "1.50 GiB", "16.0 KiB"."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / KIB:.1f} KiB" if num_bytes >= KIB else f"{num_bytes:,.0f} bytes"

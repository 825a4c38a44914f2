"""Memory mappings of this process: each compiled program has about three; past the 65,530 of vm.max_map_count, Linux
refuses more, and XLA aborts."""

from pathlib import Path

MOST = 12_000


def are_many() -> bool:
    """Whether compiled programs should be freed now: a long run compiles thousands."""
    maps = Path("/proc/self/maps")
    return maps.exists() and maps.read_bytes().count(b"\n") > MOST

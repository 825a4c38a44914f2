"""Actions on a disk tier for tests: write and read blocks, compare its books with the folder, damage files."""

from ksana_jax.kv.disk.block_file import file_bytes
from tests.kv.disk.blocks import FORMAT, blank, chain, data_of

FILE = file_bytes(FORMAT, chain(1)[0])  # of a block that starts at one digit
PLENTY = 2**20


def write(tier, *blocks, generation=0):
    for facts in blocks:
        tier.write(facts, data_of(facts, tier.format, generation))


def read(tier, facts, generation=0) -> bool:
    """True if a block is found; it is then the right one, and otherwise the array is unchanged."""
    out = blank(tier.format)
    found = tier.read(facts.key, facts, out).result(timeout=10)
    assert out.tobytes() == (data_of(facts, tier.format, generation) if found else blank(tier.format)).tobytes()
    return found


def files(tier) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in tier.folder.iterdir() if p.name != "lock"}


def assert_books(tier):
    """The tier knows exactly the existing files."""
    there = files(tier)
    assert set(there) == {f"{key.hex()}.kv" for key in tier.keys()}
    assert tier.num_bytes == sum(there.values()) <= tier.budget_bytes


def flip(place):
    """Changes a bit of a file's content."""

    def damage(content):
        index = place if place >= 0 else len(content) + place
        return content[:index] + bytes([content[index] ^ 4]) + content[index + 1 :]

    return damage

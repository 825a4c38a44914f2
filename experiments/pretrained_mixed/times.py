"""python -m experiments.pretrained_mixed.times: times decode steps of Gemma-3-270M after LENGTHS tokens, by pattern."""

from __future__ import annotations

from experiments.pretrained_bits.times import time_steps

LENGTHS = (2048, 8192)
ROWS = {
    "its own windows": {},
    "all full": {"pattern": {}},
    "windows, 512": {"pattern": {"window": 512}},
    "own, Quest": {"kv_selection": {"method": "quest", "budget": 1024}},
}

if __name__ == "__main__":
    for length in LENGTHS:
        print(f"after {length:,} tokens", flush=True)
        time_steps("gemma3-270m", length, ROWS)

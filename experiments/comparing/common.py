"""Text, models and records of the scripts in this folder. They run in the peers' environments, without ksana_jax."""

import json
import math
import pydoc_data.topics
import sys
from importlib.metadata import version
from pathlib import Path

WORK = Path(sys.argv[1])
GGUF = {
    name: next(Path.home().glob(f".cache/ksana_jax/fetched/{name}/*/*.gguf")) for name in ("smollm2", "gemma3-270m")
}
TEXT = "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))[20_000:60_000]
LENGTH, HALF = 1024, 512  # tokens of a text; where only the cache matters, those from HALF on are scored


def run(records, *packages: str) -> None:
    """Prints pairs of a row's name and figures, one JSON object a line."""
    for name, record in records:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in record.items()}
        print(json.dumps({"row": name, **rounded, "versions": {p: version(p) for p in packages}}), flush=True)


def token_ids(model: str = "smollm2", length: int = LENGTH) -> list[int]:
    """Returns the text's first tokens, without BOS, by llama.cpp's tokenizer; `of_llama_cpp.py` writes them."""
    return json.loads((WORK / f"{model}.json").read_text())[:length]


def compared(found: list[float], exact: list[float]) -> dict[str, float]:
    """Compares log-probabilities: mean and largest difference in nats, change of perplexity in percent."""
    apart = [abs(a - b) for a, b in zip(found, exact, strict=True)]
    percent = 100 * math.expm1((math.fsum(exact) - math.fsum(found)) / len(found))
    return {"mean_nats": math.fsum(apart) / len(apart), "max_nats": max(apart), "perplexity_percent": percent}

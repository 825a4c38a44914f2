"""Text, models and records of the scripts in this folder. They run in the peers' environments, without ksana_jax."""

import json
import math
import pydoc_data.topics
import sys
from importlib.metadata import version
from pathlib import Path

WORK = Path(sys.argv[1])
FETCHED = Path.home() / ".cache/ksana_jax/fetched"
GGUF = {name: next((FETCHED / name).glob("*/*.gguf")) for name in ("smollm2", "gemma3-270m")}
TEXT = "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))[20_000:60_000]
LENGTH, HALF = 1024, 512  # tokens of a text; where only the cache matters, those from HALF on are scored
ROWS = []


def row(measure):
    ROWS.append(measure)
    return measure


def run(*packages: str) -> None:
    """Prints the records of all rows, or of those named after the folder, one JSON object a line."""
    for measure in ROWS:
        for record in measure() if not sys.argv[2:] or measure.__name__ in sys.argv[2:] else ():
            rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in record.items()}
            versions = {name: version(name) for name in packages}
            print(json.dumps({"row": measure.__name__, **rounded, "versions": versions}), flush=True)


def token_ids(model: str = "smollm2", length: int = LENGTH) -> list[int]:
    """Returns the text's first tokens, without BOS, by llama.cpp's tokenizer; `of_llama_cpp.py` writes them."""
    return json.loads((WORK / f"{model}.json").read_text())[:length]


def compared(found: list[float], exact: list[float]) -> dict[str, float]:
    """Compares log-probabilities: mean and largest difference in nats, change of perplexity in percent."""
    apart = [abs(a - b) for a, b in zip(found, exact, strict=True)]
    percent = 100 * math.expm1((math.fsum(exact) - math.fsum(found)) / len(found))
    return {"mean_nats": math.fsum(apart) / len(apart), "max_nats": max(apart), "perplexity_percent": percent}


def perplexity(log_probs: list[float]) -> float:
    return math.exp(-math.fsum(log_probs) / len(log_probs))


def attempted(measure) -> dict:
    """Returns what `measure` returns, or its error as a record."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:160]}

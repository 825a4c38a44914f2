"""`python -m ksana_jax.training FILE.yaml [key=value ...]`: what `ksana train` does."""

import logging
import sys

from ksana_jax.config import ConfigError
from ksana_jax.training import train

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ksana_jax.training FILE.yaml [key=value ...]")
    try:
        train(sys.argv[1], sys.argv[2:])
    except ConfigError as error:
        sys.exit(f"error: {error}")

"""Shows the package's log on standard error."""

from __future__ import annotations

import logging
import sys


def show_log() -> None:
    """Prints INFO messages of the package; libraries stay at WARNING."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("ksana_jax").setLevel(logging.INFO)

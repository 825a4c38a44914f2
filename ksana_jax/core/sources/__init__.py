"""Finds models and texts by name: local paths, shipped models, packages of the index, the Hugging Face hub. No jax.

`resolve` maps a name to a path and is what the other packages call; `hub` reads the hub's cache and downloads;
`catalogue` lists what `ksana fetch` can get, and `fetch` gets it.
"""

from ksana_jax.core.sources.catalogue import fetched
from ksana_jax.core.sources.hub import commit_of
from ksana_jax.core.sources.resolve import MODEL_HELP, compose, display_name, expanded, model_path

__all__ = ["MODEL_HELP", "commit_of", "compose", "display_name", "expanded", "fetched", "model_path"]

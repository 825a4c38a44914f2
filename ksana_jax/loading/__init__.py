"""Reads and writes models: Hugging Face directories, GGUF files, random weights.

Names resolve on first use, so reading a config does not import jax.
"""

from typing import TYPE_CHECKING

from ksana_jax.core.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.core.errors import LoadError
    from ksana_jax.loading.config_json import check_tokenizer, load_config
    from ksana_jax.loading.export import export_hf
    from ksana_jax.loading.load import abstract_params, load_model
    from ksana_jax.models.families import config_from_hf

_PUBLIC = {
    "ksana_jax.core.errors": "LoadError",
    "ksana_jax.loading.config_json": "load_config check_tokenizer",
    "ksana_jax.models.families": "config_from_hf",
    "ksana_jax.loading.load": "load_model abstract_params",
    "ksana_jax.loading.export": "export_hf",
}
__all__ = ["LoadError", "load_config", "check_tokenizer", "config_from_hf", "load_model", "abstract_params"]
__all__ += ["export_hf"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

"""Reads and writes models: Hugging Face directories, random weights, checkpoints of a training run.

Names resolve on first use, so reading a config does not import jax, and loading weights does not import orbax.
"""

from typing import TYPE_CHECKING

from ksana_jax.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.loading.checkpoint import latest_step, restore_checkpoint, save_checkpoint
    from ksana_jax.loading.config_json import check_tokenizer, load_config
    from ksana_jax.loading.errors import LoadError
    from ksana_jax.loading.export import export_hf
    from ksana_jax.loading.load import abstract_params, load_model
    from ksana_jax.models.families import config_from_hf

_PUBLIC = {
    "LoadError": "ksana_jax.loading.errors",
    "load_config": "ksana_jax.loading.config_json",
    "check_tokenizer": "ksana_jax.loading.config_json",
    "config_from_hf": "ksana_jax.models.families",
    "load_model": "ksana_jax.loading.load",
    "abstract_params": "ksana_jax.loading.load",
    "export_hf": "ksana_jax.loading.export",
    "save_checkpoint": "ksana_jax.loading.checkpoint",
    "restore_checkpoint": "ksana_jax.loading.checkpoint",
    "latest_step": "ksana_jax.loading.checkpoint",
}
__all__ = [
    "LoadError",
    "load_config",
    "check_tokenizer",
    "config_from_hf",
    "load_model",
    "abstract_params",
    "export_hf",
    "save_checkpoint",
    "restore_checkpoint",
    "latest_step",
]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

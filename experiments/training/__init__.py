"""Trains the embedded model, ksana-tiny, on the source code of the Python standard library.

Reading order: `settings` (configuration of a run), `corpus` (training and held-out files), `tokenizer`, `batches`
(files as sequences), `recall_mix` (recall examples among them), `start` (weights before the first step), `optimizer`
(one step), `sinks` (the metric that the model is made for), `steps` and `checkpoints` (what is saved), `loop` (a run,
from corpus to exported model).
"""


def train(config_path: str, overrides: list[str] | None = None) -> None:
    """Trains and exports the model that a YAML file describes; resumes an earlier run with the same out_dir.

    Args:
      config_path: YAML whose keys are the fields of `settings.TrainConfig`.
      overrides: "key=value" with dotted keys, such as "model.d_model=64"; they take precedence over the file.

    Raises:
      ConfigError: a key is unknown or a value is invalid, in one line.
    """
    from experiments.training.loop import run  # jax and optax take seconds to import
    from experiments.training.settings import load_config

    run(load_config(config_path, overrides or []))

"""Training of the embedded model, ksana-tiny, on the sources of the Python standard library.

Reading order: `settings` (what a run is), `corpus` (which files, which are held out), `tokenizer`, `batches` (files as
sequences), `optimizer` (one step), `sinks` (the metric that the model is made for), `checkpoints`, `loop` (a run),
`export` (the Hugging Face directory).
"""


def train(config_path: str, overrides: list[str] | None = None) -> None:
    """Trains what the YAML file describes, resuming where an earlier call of the same out_dir stopped, and exports it.

    Args:
      config_path: YAML whose keys are the fields of `settings.TrainConfig`.
      overrides: "key=value" with dotted keys, such as "model.d_model=64"; they win over the file.

    Raises:
      ConfigError: an unknown key or a value that cannot be, in one line.
    """
    from ksana_jax.training.loop import run  # jax and optax take seconds to import
    from ksana_jax.training.settings import load_config

    run(load_config(config_path, overrides or []))

"""The configs of the repository by name, and possible costs of a step, for plans without compiling."""

from pathlib import Path

from ksana_jax.loading.config_json import load_config
from ksana_jax.runner.planner.step_memory import Line, StepCost

FOLDER = Path(__file__).parents[3] / "configs" / "models"
MODELS = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
# Fixed, per row, per entry of a block table, and query tiles with tables of their own: of network and of sampling.
STEP = StepCost((Line(3e8, 1e6, 8.5, 16), Line(1e8, 2e6, 0, 16)), "a test")


def read(name: str):
    """The config of configs/models/NAME."""
    return load_config(FOLDER / name)

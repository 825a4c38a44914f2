"""Copies the repository's configs/ into the wheel as ksana_jax/configs; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # an editable installation finds configs/ next to the package
            kept = shutil.ignore_patterns("train")  # for experiments/training
            shutil.copytree("configs", Path(self.build_lib) / "ksana_jax" / "configs", ignore=kept, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})

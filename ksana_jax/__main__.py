"""The `ksana` command, also as `python -m ksana_jax`."""

from ksana_jax.cli import main

if __name__ == "__main__":
    main()

"""`python -m ksana_jax`: the `ksana` command where its script is not on the path."""

from ksana_jax.cli import main

if __name__ == "__main__":
    main()

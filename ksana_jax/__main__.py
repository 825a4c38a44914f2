"""The `ksana` command, also as `python -m ksana_jax`. Handles Ctrl-C before anything that takes time is imported."""

from ksana_jax.core import interrupts


def main() -> None:
    """Entry point."""
    with interrupts.command():
        from ksana_jax.cli import main as run

        run()


if __name__ == "__main__":
    main()

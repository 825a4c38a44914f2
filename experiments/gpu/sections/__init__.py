"""One file for each section; its `run(context)` records what it finds."""

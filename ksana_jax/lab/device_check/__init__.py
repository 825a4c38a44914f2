"""Tries out a device's capabilities: `ksana doctor --device`, the kit for authors of PJRT plugins.

Plugins abort and hang where they lack something, so each group of checks runs in a child process with a time limit.

Reading order: `findings` (the results), `checks` and `operations` (the groups), `child` (runs one), `report` (runs
all and shows them).
"""

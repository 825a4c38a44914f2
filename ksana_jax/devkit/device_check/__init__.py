"""Tries out what a device can do: `ksana doctor --device`, and the kit for authors of PJRT plugins.

Plugins abort and hang where they lack something, so each group of checks runs in a child process with a time limit.

Reading order: `findings` (what is found), `checks` and `operations` (the groups), `child` (runs one), `report` (runs
all and shows them).
"""

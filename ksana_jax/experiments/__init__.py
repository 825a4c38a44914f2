"""Ablations from one YAML file: a grid of trials through the real engine, appended records, a table and a figure.

Reading order: `config` (a YAML file becomes a list of trials), `tasks/base` (what a task is), `tasks/perplexity`, `run`
(the loop that can be killed), `records` (what it writes), `report` (tables and figures from the records alone).
"""

"""Runs ablations from one YAML file: a grid of trials on the real engine, resumable records, a table and a figure.

Reading order: `config` (turns a YAML file into a list of trials), `tasks/base` (the interface of tasks),
`tasks/perplexity`, `run` (the loop, which may be killed at any time), `records` (its output), `report` (tables and
figures from the records alone).
"""

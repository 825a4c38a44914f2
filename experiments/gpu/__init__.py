"""Kernels and engine measured on one Hopper GPU, beside what else is installed there: `python -m experiments.gpu`.

Reading order: `plan` (the sections and their deadlines), `driver` (runs each in a process of its own and merges), then
`context` (what a section gets), `timing` (the only stopwatch), `cases` and `candidates` (what is timed on what),
`peer` and `torch_peer` (torch in a process of its own), `sections/`, `table` (the last thing printed).
"""

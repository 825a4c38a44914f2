"""Kernels and engine measured on one Hopper GPU, next to what else is installed there: `python -m experiments.gpu`.

Reading order: `plan` (the sections and their deadlines), `driver` (runs each in a process of its own and merges),
`marks` (which case a process died at), then `context` (what a section gets), `timing` (the only stopwatch), `cases` and
`candidates` (the timed implementations), `programs` (compiled on demand), `race` (candidates side by side), `peer`
and `torch_peer` (torch in a process of its own), `sections/`, `table` (the last thing printed).
"""

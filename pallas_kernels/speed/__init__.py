"""A model of speed for kernels that no GPU has run: machine code is counted and simulated. Its figures are computed.

sass      text of nvdisasm -> instructions with their stall counts and scoreboards
flow      basic blocks, loops, the path of one turn
parts     the inner loop of a kernel, what is before, around and after it; its instructions by kind
pipes     what an instruction occupies, and how long;  chip: rates, latencies and sizes, with their sources
warp      simulates turns of a loop on one scheduler of a multiprocessor
lists     shapes of the GPU script, their lists of work and grids
predict   cycles against the memory time of the bytes: microseconds, share of a copy or TFLOP/s, and what limits
launches  what a whole program starts, and the bytes of each launch
steps     whole steps with the choice of their tokens: their launches and gaps
models    which model belongs to which case of the report
baseline  predictions that are stored, and compared with new ones
"""

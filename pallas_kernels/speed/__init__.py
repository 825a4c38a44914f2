"""A model of speed for kernels that no GPU has run: machine code is counted and simulated. Its figures are computed.

sass      text of nvdisasm -> instructions with their stall counts and scoreboards
flow      basic blocks, loops, the path of one turn
parts     the inner loop of a kernel, the code before, around and after it; its instructions by kind
pipes     use of pipes by an instruction, and its time;  chip: rates, latencies and sizes, with their sources
warp      simulates turns of a loop on one scheduler of a multiprocessor
lists     shapes of the GPU script, their lists of work and grids
predict   cycles against the memory time of the bytes: microseconds, share of a copy or TFLOP/s, and what limits
launches  launches of a whole program, and the bytes of each
steps     whole steps with the choice of their tokens: their launches and gaps
models    the model of speed for each case of the report
baseline  predictions that are stored, and compared with new ones
"""

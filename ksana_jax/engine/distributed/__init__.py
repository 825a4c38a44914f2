"""Several processes, on one host or many, that run one engine: process 0 drives the others, or all make the same calls.

Process 0 listens, and the others connect. They show each other that they know KSANA_JOB_TOKEN and have the same
versions; only then do all start jax, with their devices in one mesh. Before each step, process 0 sends the step's
arrays to the others; in an SPMD program, every process has them, and sends their digest to process 0. When a
connection breaks, the job ends (`job`).

What connected processes send is pickled: anyone who knows the token can execute code in all of them. jax's own
coordination service and collectives (gloo, NCCL) know no token: run jobs in a network that you trust.
"""

"""Several processes, on one host or many, that run one engine: process 0 drives, the others are workers.

Process 0 listens at the coordinator's address. The others connect and show that they have the same job token and the
same versions; only then do all start jax, with their devices in one mesh. From then on, process 0 sends each step's
arrays to every other one before it starts the step itself, over the same connection. When that connection breaks, the
job ends (`job`).

Processes that connect must know the token in the environment variable KSANA_JOB_TOKEN; nothing that they send is
executed or unpickled (`wire`). jax's own coordination service and collectives (gloo, NCCL) know no token:
run jobs in a network that you trust.
"""

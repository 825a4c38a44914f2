#!/usr/bin/env bash
# jax 0.10.2 on the CPU: after jax.distributed.initialize, SIGTERM does not end the process.
#
# Guess: a program that joins a job still ends when it is sent SIGTERM, with status 143, unless it handles it.
# Seen: initialize starts a preemption service by default, whose C++ handler takes the signal for itself. The process goes
# on and ends with status 0. With jax_enable_preemption_service off before initialize, SIGTERM ends it.
# Hurt: whoever stops or restarts a job by SIGTERM, as Slurm, Kubernetes and systemd do: the process lives until SIGKILL,
# and a supervisor that waits for its status takes it for finished.
# Versions: Python 3.11, jax and jaxlib 0.10.2. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import socket
import subprocess
import sys

import jax

print(f"jax {jax.__version__}")
START = """
import jax
with_service = {}
if not with_service:
    jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize("127.0.0.1:{}", num_processes=1, process_id=0)
"""
END_OF_ALL = """
import os, signal, time
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("it goes on")
"""
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ways = {"before it": "", "after it": START.format(True, port), "after it, without service": START.format(False, port)}
seen = {}
for name, start in ways.items():
    done = subprocess.run([sys.executable, "-c", start + END_OF_ALL], capture_output=True, text=True, timeout=120)
    seen[name] = done.returncode
    print(f"SIGTERM {name:26} status {done.returncode:3} {done.stdout.strip()}")
assert list(seen.values()) == [-15, 0, -15], "the behaviour has changed"
END

"""Two network namespaces, each with its own address and loopback, stand in for two machines that divide a model."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.engine.distributed.test_processes import ENVIRONMENT, MODEL
from tests.loading.models_on_disk import random_tensors, write_model

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="makes network namespaces, as root"),
    pytest.mark.skipif(shutil.which("ip") is None or shutil.which("tc") is None, reason="iproute2 is not installed"),
]
# Until the kernel gives a silent host up, and a process that waits for it in a step ends.
ENDS_S = 15


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def hosts():
    """Names of two namespaces, whose links are all called eth0, with the addresses 10.77.0.1 and 10.77.0.2."""
    names = [f"ksana-{secrets.token_hex(3)}-{i}" for i in range(2)]
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"the kernel makes no network namespaces: {error.stderr.decode().strip()}")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for i, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@contextlib.contextmanager
def job(hosts, model, port):
    """Both processes, once they have computed tokens, and these tokens."""
    address = f"10.77.0.1:{port}"
    commands = (
        ["-m", "tests.engine.distributed.leader", "forever", str(model), address],
        ["-m", "tests.engine.distributed.leader", "follow", str(model), address],
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen(["ip", "netns", "exec", host, sys.executable, *words], env=os.environ | ENVIRONMENT, **pipes)
        for host, words in zip(hosts, commands, strict=True)
    ]
    try:
        line = both[0].stdout.readline()
        assert line, [process.communicate(timeout=20)[1][-2000:] for process in both]
        yield *both, json.loads(line)["several"]
    finally:
        for process in both:
            process.kill()
            process.communicate()


def ended(process, began: float) -> str:
    """What a process has written, once it has ended; within the time."""
    output = "".join(process.communicate(timeout=max(began + ENDS_S - time.monotonic(), 0.1)))
    assert time.monotonic() - began < ENDS_S
    return output


def test_a_lossy_link_carries_a_job_and_a_broken_one_or_a_lost_process_ends_it(hosts, tmp_path):
    model = write_model(tmp_path / "model", random_tensors(MODEL), MODEL)
    with job(hosts, model, 5000) as (leads, follows, first):
        # Packets that are lost are sent again: slower, and no error.
        lossy = "qdisc add dev eth0 root netem loss 20%".split()
        if subprocess.run(["tc", "-n", hosts[0], *lossy], capture_output=True, check=False).returncode:
            print("the kernel has no netem: the link is down for 2 s instead")
            ip("-n", hosts[0], "link", "set", "eth0", "down")
            time.sleep(2)
            ip("-n", hosts[0], "link", "set", "eth0", "up")
        time.sleep(5)
        assert leads.poll() is None and follows.poll() is None
        ip("-n", hosts[0], "link", "set", "eth0", "down")
        began = time.monotonic()
        outputs = [ended(process, began) for process in (leads, follows)]
        print(f"both have ended {time.monotonic() - began:.1f} s after the link")
        assert "process 1 (" in outputs[0] and "is gone" in outputs[0]
        assert "process 0 (10.77.0.1:5000) is gone" in outputs[1] or "JAX distributed service detected" in outputs[1]
        assert follows.returncode
    subprocess.run(["tc", "-n", hosts[0], *"qdisc del dev eth0 root".split()], capture_output=True, check=False)
    ip("-n", hosts[0], "link", "set", "eth0", "up")
    # The job is started again, at the same address.
    for victim in (1, 0):
        with job(hosts, model, 5000) as (*both, again):
            assert again == first
            both[victim].send_signal(signal.SIGKILL)
            output = ended(both[1 - victim], time.monotonic())
            assert f"process {victim} (" in output or "JAX distributed service detected" in output

"""These tests need a process that jax was started in on the loopback: `tests.devices.test_on_loopback` makes one."""

import json
import os

setting = json.loads(os.environ.get("KSANA_TEST_DEVICE", "{}"))
collect_ignore_glob = [] if setting.get("plugin") == "loopback" else ["test_*.py"]

"""The tests of `on_devices` need eight devices, which `test_on_devices.py` gives them in a process of their own."""

import os

collect_ignore = [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["on_devices"]

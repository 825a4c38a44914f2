"""The host-device interface of a step, and how steps are built."""

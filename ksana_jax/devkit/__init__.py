"""Tools for developers of devices and kernels: checks of a PJRT plugin, compilation for absent hardware."""

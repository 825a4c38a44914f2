"""Tools for developers of devices and kernels: checks of a PJRT plugin, compilation for absent hardware.

`loopback` is for tests in a checkout; wheels leave it out.
"""

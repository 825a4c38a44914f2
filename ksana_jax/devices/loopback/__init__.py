"""A PJRT plugin without hardware: jaxlib's CPU client behind the C API through which jax talks to accelerators.

It exists to test what a new accelerator meets: discovery, the C API as jaxlib calls it, what jax does by platform name,
memory limits, and functions or operations that are missing. It says nothing about any vendor's compiler, numbers or
speed, and its devices have "loopback" in their kind. It is never registered unless asked for: see
`ksana_jax.core.device_setting`.

Reading order: `abi` (the table), `marshal` (handles, strings, errors), `hardware` and `state`; `client`, `devices`,
`buffers`, `programs`, `running` (the functions by subject); `plugin` (the table filled in), `doors` (native code around
callbacks).
"""

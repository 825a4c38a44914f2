"""A PJRT plugin that simulates a limited device, for tests in a checkout; wheels leave it out.

`openxla` fetches a prebuilt plugin; `wrapper` wraps it; `operations` lists the StableHLO operations of a
program. `withheld` runs engines without one function or operation at a time, and `page` prints the outcomes.
"""

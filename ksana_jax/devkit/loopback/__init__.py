"""A PJRT plugin that plays a lesser device, for tests in a checkout; wheels leave it out.

`openxla` fetches a plugin that others have built; `wrapper` wraps it; `operations` lists the StableHLO operations of a
program. `withheld` runs engines without one function or operation at a time, and `page` prints what became of them.
"""

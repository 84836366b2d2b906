"""Sweeps: many runs of one experiment, and what comes of them.

* `grid`: the product of the values of some fields, one run after another.
"""

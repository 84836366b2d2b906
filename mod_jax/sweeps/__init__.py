"""Sweeps: many runs of one experiment, and what comes of them.

* `grid`: the product of the values of some fields, one run after another.
* `prove`: what the steps of a sweep's runs take on slices of TPUs (`slices`),
  read from programs compiled for them (`hlo`).
"""

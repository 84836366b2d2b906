"""Sweeps: many runs of one experiment, and what comes of them.

* `grid`: the product of the values of some fields, one run after another.
* `plan`: models of several sizes at equal training FLOPs, kept in a `manifest`;
  `tables` shows it.
* `prove`: what the steps of a sweep's runs take on slices of TPUs (`slices`),
  read from programs compiled for them (`hlo`).
* `run`: trains them, by any number of workers.
* `fit`: the least losses at equal FLOPs (`optimum`), and their pictures.
* `compare`: any runs beside each other.
"""

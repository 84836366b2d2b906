"""Sweeps: many runs of one experiment, and their evaluation.

* `grid`: all combinations of some fields' values, one run after another.
* `plan`: plans models of several sizes at equal training FLOPs, and writes them
  to a `manifest`.
* `prove`: compiles their training steps for slices of TPUs (`slices`), and
  analyses memory, FLOPs and communication of the programs (`hlo`).
* `run`: trains them, with any number of workers.
* `fit`: the minima of the loss at equal FLOPs (`optimum`), and their pictures.
* `compare`: a table and a picture of any runs.
"""

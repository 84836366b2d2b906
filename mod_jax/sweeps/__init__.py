"""Sweeps: many runs of one experiment, and their evaluation.

* `grid`: all combinations of some fields' values.
* `plan`: models of several sizes at equal training FLOPs; their list is the
  `manifest`.
* `run`: trains the runs of a grid or a plan, with any number of workers.
* `fit`: the minima of the loss at equal FLOPs (`optimum`), and their pictures.
* `compare`: a table and a picture of any runs.
"""

"""Training: state, optimiser, pure steps, and the loop around them.

Only the loop and what it calls in this package read clocks or write files:

* `checkpoints`: verified saving and restoring;
* `metrics`: sums that are divided once, and the files they are written to;
* `progress`: the bar on a terminal, plain lines elsewhere.
"""

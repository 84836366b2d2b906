"""The engine: state, optimiser, pure steps, and the loop around them.

Only this package's loop and what it calls read clocks or write files:

* `checkpoints`: saving and restoring, verified;
* `metrics`: sums that become means once, and the files they are written to;
* `progress`: the bar on a terminal, plain lines elsewhere.
"""

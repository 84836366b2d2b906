"""Training: state, pure steps, evaluation, and the loop around them.

Only the loop and what it calls read clocks or write files. `progress` draws the
bar on a terminal, and plain lines elsewhere.
"""

"""Training: state, pure steps, evaluation, and the loop around them.

* `task`: the interface of what is trained;
* `state`, `step`: the training state, and pure functions that update it;
* `loop`: builds a run and takes its steps;
* `hooks`, `profile`, `progress`: logs, checkpoints, traces, a progress bar;
* `evaluation`: held-out metrics, reports and studies.

`state`, `step` and `task` neither read clocks nor write files.
"""

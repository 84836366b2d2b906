"""Training steps compiled for slices of TPUs that need not be there.

* `prove`: compiles runs, and reports memory, FLOPs and communication.
* `hlo`: the FLOPs and the communication of a compiled program.
* `slices`: the slices that there are, and what their chips can do.
"""

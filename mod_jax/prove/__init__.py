"""Compiles training steps for TPUs and GPUs that need not be present.

* `prove`: compiles runs, and reports memory, FLOPs and communication.
* `hlo`: the FLOPs and the communication of a compiled program.
* `slices`: the available slices, and the specifications of their chips.
"""

"""What a run leaves on disk, and how it is read again.

* `checkpoints`, `checksums`: verified saving and restoring of the training
  state and of the position in the data;
* `best`: which checkpoint is the best by a held-out metric;
* `lock`: one writer of a directory;
* `metrics`: sums that are divided once, and the files they are written to;
* `stop`: signals that end a run after a save;
* `workdir`, `run_config`, `history`, `origin`: the config, the data and the
  weights that a run began with, and what has happened to it since.
"""

"""Conditional computation in transformers, in JAX and Flax.

`load` returns a trained or pretrained model with its weights. The public names
are imported at their first use, so that `import mod_jax` takes no time. The
packages:

* `layers`, `models`, `routing`, `losses`: models and what they compute;
* `data`, `tasks`, `train`: input pipelines, tasks, and the training loop;
* `runs`, `sweeps`: the files of a run; many runs and their evaluation;
* `studies`, `viz`: analyses of trained models; figures;
* `pretrained`, `convert`: loading, routing and export of weights;
* `sampling`, `serving`: generation; an HTTP server;
* `prove`: training steps compiled for TPUs that need not be there;
* `scripts`: console commands.
"""

import importlib

__version__ = '0.1.0'

# The module of each public name.
_PUBLIC = {
  'Run': 'mod_jax.pretrained.load',
  'compare': 'mod_jax.sweeps.compare',
  'export': 'mod_jax.pretrained.export',
  'load': 'mod_jax.pretrained.load',
  'route': 'mod_jax.pretrained.route',
}

__all__ = ('Run', 'compare', 'export', 'load', 'route')


def __getattr__(name):
  if name in _PUBLIC:
    return getattr(importlib.import_module(_PUBLIC[name]), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_PUBLIC])

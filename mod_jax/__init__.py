"""Conditional computation in transformers, in JAX and Flax.

`load` returns a trained or pretrained model with its weights. The public names
are imported at their first use, so that `import mod_jax` takes no time. The
packages: `layers`, `models`, `losses` and `routing` compute; `data` has input
pipelines, `tasks` modalities and methods, `train` the training loop; `runs` has
the files of runs, `sweeps` and `studies` many runs; `pretrained` and `convert`
load and export; `sampling` and `serving` generate text; `prove` compiles for
other devices, `viz` draws figures, and `scripts` has the commands.
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

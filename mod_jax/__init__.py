"""Conditional computation in transformers, in JAX and Flax.

`load` gives a trained or pretrained model with its weights. What is here is
imported when it is first asked for, so that `import mod_jax` costs nothing.
"""

import importlib

__version__ = '0.1.0'

# Where what people need is found.
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

"""The dense twin of `configs/lm/mod.py`. Variants: `tiny`."""

import importlib.util
import pathlib

from mod_jax import config as config_lib


def _mod():
  """Loads the file beside this one: config files are no package."""
  path = pathlib.Path(__file__).with_name('mod.py')
  spec = importlib.util.spec_from_file_location('mod_config', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def get_config(variant: str = ''):
  mod = _mod()
  base = mod.experiment(None, 'dense')
  table = {'': lambda: base, 'tiny': lambda: mod.tiny(base)}
  return config_lib.to_config_dict(config_lib.choose(variant, table)())

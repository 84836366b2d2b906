"""The dense twin of `configs/lm/mod.py`. Variants: `tiny`."""

from mod_jax import config as config_lib


def get_config(variant: str = ''):
  mod = config_lib.sibling(__file__, 'mod')
  base = mod.experiment(None, 'dense')
  table = {'': lambda: base, 'tiny': lambda: mod.tiny(base)}
  return config_lib.to_config_dict(config_lib.choose(variant, table)())

"""The dense twins of `configs/lm/mod.py`, trained for as many FLOPs.

Between them they tell what the routed blocks are worth. Variants:

* the plain one has as many blocks, all of them dense, and so takes fewer steps;
* `shallow` has the dense blocks only, and takes more steps;
* `tiny`: seconds, for tests.
"""

from mod_jax import config as config_lib

mod = config_lib.sibling(__file__, 'mod')
VARIANTS = {
  '': lambda: mod.experiment(None, 'dense'),
  'shallow': lambda: mod.experiment(None, 'dense_shallow', num_layers=1),
  'tiny': lambda: mod.tiny(mod.experiment(None, 'dense')),
}

get_config = config_lib.config_getter(VARIANTS)

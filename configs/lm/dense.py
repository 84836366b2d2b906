"""Dense baselines of `configs/lm/mod.py`, trained for as many FLOPs.

They show what the routed blocks are worth. Variants:

* the default has as many blocks, all of them dense, and so takes fewer steps;
* `shallow` has only the dense blocks, and takes more steps;
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

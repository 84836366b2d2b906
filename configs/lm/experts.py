"""The model of `configs/lm/mod.py` with experts in place of feed-forwards.

Eight experts, each as large as the feed-forward that it replaces; a token runs
one of them. No block is routed. All variants train for as many FLOPs as
`mod.py`, where all slots of experts count, filled or not:

* `reduced`: half of the slots that balanced experts would fill; tokens without
  a slot skip the experts. The baseline of `integrated`;
* `integrated`: a ninth choice is a no-op, which should get half of all tokens
  (Mixture-of-Depths-and-Experts);
* `staged`: the blocks are routed as in `mod.py`, around attention and experts;
* `two`: each token runs two experts, each half as large;
* `expert_choice`: the experts choose tokens, so that a token has two experts on
  average;
* `tiny`: seconds, for tests; `tiny_staged` and `tiny_expert_choice` likewise.
"""

import dataclasses
import functools

from mod_jax import config as config_lib
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.tasks.experiment import ExperimentConfig

mod = config_lib.sibling(__file__, 'mod')
EXPERTS = ExpertsConfig(num_experts=8, capacity_factor=1.25)
HIDDEN = 512  # Units of the feed-forward that an expert replaces.
SHARE = 0.5  # Share of choices that experts get in `reduced` and `integrated`.
CHANGES = {
  '': {},
  'reduced': {'capacity_factor': SHARE},
  'integrated': {'num_nulls': 1, 'compute_share': SHARE},
  'staged': {},
  'two': {'per_token': 2, 'hidden': HIDDEN // 2},
  'expert_choice': {
    'choice': 'expert',
    'capacity_factor': 2.0,
    'threshold_decay': 0.99,
  },
}


def experiment(name: str) -> ExperimentConfig:
  """Returns the run of a variant."""
  routing = mod.ROUTING if name == 'staged' else None
  experts = dataclasses.replace(EXPERTS, **CHANGES[name])
  return mod.experiment(
    routing, '_'.join(filter(None, ('experts', name))), experts=experts
  )


def tiny(name: str) -> ExperimentConfig:
  """Returns a variant with few experts, in seconds."""
  small = mod.tiny(experiment(name))
  return config_lib.replace(small, {'model.experts.num_experts': 2})


VARIANTS = {
  **{name: functools.partial(experiment, name) for name in CHANGES},
  'tiny': functools.partial(tiny, 'integrated'),
  'tiny_staged': functools.partial(tiny, 'staged'),
  'tiny_expert_choice': functools.partial(tiny, 'expert_choice'),
}

get_config = config_lib.config_getter(VARIANTS)

"""A dense language model converted to adaptive modules, in three phases.

    make twins
    python train.py --config=configs/acm/lm.py --workdir=runs/acm_lm \\
      --config.init=runs/mod_dense

`make twins` trains the model of `configs/lm/dense.py`; the phases are as in
`configs/acm/vit.py`. Variants: `ffn` converts only its FFNs; `mod` converts the
routed model of `configs/lm/mod.py`, from one of its runs
(`--config.init=runs/mod`); `tiny` is for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.tasks.experiment import ACMObjective, ExperimentConfig, PhaseConfig

dense = config_lib.sibling(__file__, '../lm/dense')
mod = config_lib.sibling(__file__, '../lm/mod')
digits = config_lib.sibling(__file__, 'vit').digits


def convert(
  base: ExperimentConfig, name: str, adaptive: AdaptiveConfig, **phase
) -> ExperimentConfig:
  """Returns the conversion of a run; keywords are fields of all its phases."""
  objective = digits().objective
  settings = {'batch_size': base.train.batch_size, **phase}
  return dataclasses.replace(
    base,
    name=name,
    model=dataclasses.replace(base.model, adaptive=adaptive),
    optimizer=digits().optimizer,
    objective=dataclasses.replace(
      objective,
      **{
        name: dataclasses.replace(getattr(objective, name), **settings)
        for name in ('learners', 'gates', 'end_to_end')
      },
    ),
  )


def tiny() -> ExperimentConfig:
  phase = PhaseConfig(num_steps=6, batch_size=8, learning_rate=1e-3)
  experiment = convert(
    dense.VARIANTS['tiny'](), 'acm_lm_tiny', AdaptiveConfig()
  )
  objective = ACMObjective(
    budget=0.4, learners=phase, gates=phase, end_to_end=phase
  )
  return dataclasses.replace(experiment, objective=objective)


VARIANTS = {
  '': lambda: convert(dense.VARIANTS[''](), 'acm_lm', AdaptiveConfig()),
  'ffn': lambda: convert(
    dense.VARIANTS[''](), 'acm_lm_ffn', AdaptiveConfig(replace=(FFNS,))
  ),
  'mod': lambda: convert(mod.VARIANTS[''](), 'acm_lm_mod', AdaptiveConfig()),
  'tiny': tiny,
}

get_config = config_lib.config_getter(VARIANTS)

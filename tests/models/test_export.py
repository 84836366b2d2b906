"""Every model becomes one program for all batches (`jax.export`)."""

import dataclasses
import functools

import jax
from jax import export
import numpy as np
import pytest
import tiny

from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig

pytestmark = pytest.mark.slow

LEARNED = VisionRoutingConfig(capacity=0.5, score='learned', gate='sigmoid')
CAUSAL = MoDConfig(capacity=0.5, threshold_decay=0.9)
# The last has more tokens than a tile of the kernels' references.
BATCHES = (1, 40)


vit = functools.partial(dataclasses.replace, tiny.VIT)
lm = functools.partial(dataclasses.replace, tiny.LM)
ACM = AdaptiveConfig(num_learners=2)
MODELS = {
  'vit': vit(distilled=True),
  'amod': vit(routing=VisionRoutingConfig(capacity=0.5)),
  'vit_mod': vit(routing=LEARNED),
  'vit_acm': vit(adaptive=ACM, num_layers=1),
  'vit_experts': vit(experts=ExpertsConfig(num_experts=2)),
  'dynamic_vit': DynamicViTConfig(backbone=tiny.VIT, stages=(1,)),
  'lm': tiny.LM,
  'mod': lm(routing=CAUSAL),
  'threshold': lm(routing=CAUSAL),
  'lm_acm': lm(adaptive=ACM, num_layers=1),
  'experts': lm(experts=ExpertsConfig(num_experts=2)),
  'experts_choose': lm(experts=ExpertsConfig(num_experts=2, choice='expert')),
}


@pytest.mark.parametrize('name', MODELS)
def test_one_program_takes_all_batches(name):
  config = MODELS[name]
  model = config.build()
  if name == 'threshold':
    model = config.build(routing=config.routing_mode('threshold'))
  make = tiny.tokens if isinstance(config, LMConfig) else tiny.images
  inputs = [make(batch) for batch in BATCHES]
  variables = tiny.variables(config)

  @jax.jit
  def logits(variables, inputs):
    output = model.apply(variables, inputs)
    return getattr(output, 'logits_BV', getattr(output, 'logits_BLV', None))

  (batch,) = export.symbolic_shape('batch')
  symbols = jax.ShapeDtypeStruct((batch, *inputs[0].shape[1:]), inputs[0].dtype)
  # Also where the program is made on another machine than it will run on.
  exported = export.export(logits, platforms=('cpu', 'tpu', 'cuda'))
  program = exported(variables, symbols)
  for values in inputs:
    np.testing.assert_allclose(
      program.call(variables, values), logits(variables, values), atol=2e-5
    )

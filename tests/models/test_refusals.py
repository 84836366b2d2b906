"""Bad input is refused in a sentence that names it and the way out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import sampling
from mod_jax.errors import UserError
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.reduction import EViT, ToMe
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models.acm import acmize
from mod_jax.models.detr import DETRConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMCache, LMConfig
from mod_jax.models.vit import resize_positions
from mod_jax.tasks.experiment import ConversionObjective, ExperimentConfig

vit = functools.partial(dataclasses.replace, tiny.VIT)
AMOD = vit(routing=VisionRoutingConfig(capacity=0.5))
PRUNED = DynamicViTConfig(backbone=tiny.VIT, stages=(0, 1))
pruned = functools.partial(dataclasses.replace, PRUNED)
ADAPTIVE = AdaptiveConfig(num_learners=2)
NO_DECAY = ExpertsConfig(num_experts=2, choice='expert')


def adapted(model=tiny.VIT, **options):
  adaptive = dataclasses.replace(ADAPTIVE, **options)
  return dataclasses.replace(model, adaptive=adaptive)


@pytest.mark.parametrize(
  ('build', 'fields', 'named'),
  [
    (
      vit,
      {'reduction': ToMe(), 'routing': VisionRoutingConfig()},
      'reduction=.*routing=None',
    ),
    (vit, {'reduction': EViT()}, r'reduction\.stages=.*0 to 1'),
    (
      pruned,
      {'backbone': vit(reduction=ToMe())},
      r'backbone\.reduction=None',
    ),
    (LMConfig, {'width': 10, 'num_heads': 4}, 'width=10, num_heads=4'),
    (LMConfig, {'num_kv_heads': 4}, 'num_kv_heads=4, num_heads=6: .*divide'),
    (LMConfig, {'num_layers': 5, 'scan_layers': True}, '=5.*period=2'),
    (
      LMConfig,
      {'scan_layers': True, 'routing': MoDConfig(capacity=(0.5, 0.25))},
      'block=3: .*block 1.*scan_layers=False.* capacity',
    ),
    (
      LMConfig,
      {'num_layers': 1, 'routing': MoDConfig()},
      'num_layers=1.*off',
    ),
    (LMConfig, {'attention': 'cudnn'}, "attention='cudnn'.*dtype='bf"),
    (LMConfig, {'early_exit': 4}, 'early_exit=4, num_layers=4'),
    (
      LMConfig,
      {'early_exit': 1, 'scan_layers': True},
      'early_exit=1, scan_layers=True',
    ),
    (
      LMConfig,
      {'experts': NO_DECAY, 'routing': MoDConfig(train_rule='router')},
      r"train_rule='router': .*choice='token'",
    ),
    (
      LMConfig,
      {'experts': NO_DECAY, 'adaptive': ADAPTIVE},
      r'adaptive\.replace.*experts',
    ),
    (vit, {'image_size': 9}, 'image_size=9, patch_size=2: .*such as'),
    (vit, {'patch_size': 1, 'stem': ConvStemConfig()}, "stem's stride"),
    (vit, {'routing': VisionRoutingConfig(layers=(0,))}, 'block=0: .*before'),
    (vit, {'routing': VisionRoutingConfig(layers=(9,))}, r'layers=\(9,\).*1'),
    (pruned, {'stages': (1, 0)}, r'stages=\(1, 0\): .*ascending'),
    (pruned, {'keep': (0.5,)}, 'a fraction for each stage'),
    (pruned, {'keep': (0.5, 0.7)}, 'none larger than the one before'),
    (pruned, {'score': 'class_attention'}, 'stages without 0'),
    (
      pruned,
      {'stages': (1,), 'backbone': AMOD},
      r'stages=\(1,\): .*routed by the attention',
    ),
    (
      pruned,
      {'stages': (0,), 'score': 'structural', 'backbone': AMOD},
      "score='structural': .*backbone.routing=None",
    ),
    (
      DETRConfig,
      {'routing': VisionRoutingConfig(keep_class_token=True)},
      'keep_class_token=True: .*no class token',
    ),
    (
      DETRConfig,
      {'routing': VisionRoutingConfig(score='learned', shared_router=True)},
      r"shared_router=True, routed=.*routed=\('encoder', 'queries'\)",
    ),
    (
      DETRConfig,
      {
        'routing': VisionRoutingConfig(
          score='learned', per_sequence=True, balance_loss=0.01
        )
      },
      r"per_sequence=True, routed=.*routed=\('encoder', 'queries'\)",
    ),
    (adapted, {'num_learners': 3}, 'num_learners=3, hidden=32: .*divide'),
    (adapted, {'replace': ('block_0/mpl',)}, 'block_0/mpl.*is block_0/mlp'),
    (
      adapted,
      {
        'model': dataclasses.replace(tiny.LM, scan_layers=True),
        'replace': ('block_1/mlp',),
      },
      'block=1: .*like block 0.*scan',
    ),
    (
      ExperimentConfig,
      {
        'model': LMConfig(early_exit=2),
        'objective': ConversionObjective(teacher='x'),
      },
      'early_exit=2 and objective=',
    ),
  ],
)
def test_configs_that_do_not_fit(build, fields, named):
  with pytest.raises(UserError, match=named) as error:
    build(**fields)
  assert '\n' not in str(error.value)


B, L = 3, 10
TOKENS_BL = tiny.tokens(B, L)
MOD = dataclasses.replace(tiny.LM, routing=MoDConfig(router_loss=0.0))
SEQUENCES = dataclasses.replace(
  tiny.LM,
  routing=MoDConfig(per_sequence=True, balance_loss=0.1, router_loss=0.0),
)


@pytest.mark.parametrize(
  ('tokens', 'kwargs', 'named'),
  [
    ([1, 2, 3], {}, "tokens='list': .*asarray.*pad_prompts"),
    (np.arange(5), {}, r'shape=\(5,\).*tokens\[None\]'),
    (np.zeros((2, 3), np.float32), {}, "dtype='float32': expected integers"),
    (TOKENS_BL, {'valid_BL': jnp.ones((B, 4), bool)}, r'valid.*\(3, 4\)'),
    (TOKENS_BL, {'segment_BL': jnp.ones(L, int)}, r'segment.*\(10,\)'),
    (np.array([[1, 256]]), {}, r"'1\.\.256', vocab_size=256: .*from 0 to 255"),
  ],
)
def test_tokens_that_are_none(tokens, kwargs, named):
  with pytest.raises(UserError, match=named):
    tiny.LM.build().apply(tiny.variables(tiny.LM), tokens, **kwargs)


def call(config, *inputs, build=None, **kwargs):
  """Calls a model without computing anything."""
  inputs = inputs or (TOKENS_BL,)
  model = config.build(**(build or {}))
  run = functools.partial(model.apply, **kwargs)
  return jax.eval_shape(run, tiny.shapes(config), *inputs)


SEGMENTS = {'segment_BL': jnp.ones((B, L), int)}
CACHE = LMCache.empty(SEQUENCES, B, L, RoutingMode())
IMAGES = tiny.images(B)


@pytest.mark.parametrize(
  ('run', 'named'),
  [
    (
      lambda: call(MOD, mode='threshold'),
      "rule='threshold': .*one of top_k, never, as this model was trained",
    ),
    (
      lambda: call(
        *(tiny.LM, TOKENS_BL),
        **SEGMENTS,
        cache=LMCache.empty(tiny.LM, B, L, RoutingMode()),
      ),
      'segment_BL',
    ),
    (
      lambda: call(SEQUENCES, cache=CACHE),
      'per_sequence=True.*cannot sample',
    ),
    (
      lambda: call(SEQUENCES, **SEGMENTS),
      'per_sequence=True.*one document per row',
    ),
    (
      lambda: sampling.generate(
        *(SEQUENCES.build(), tiny.variables(SEQUENCES), TOKENS_BL),
        max_new_tokens=2,
      ),
      'still to be written',
    ),
    (lambda: call(tiny.VIT, IMAGES[:, :4]), r'expected \[batch, 8, 8, 3\]; r'),
    (
      lambda: call(AMOD, IMAGES, build={'routing': RoutingMode(rule='router')}),
      "rule='router': .*'top_k'.*whole input",
    ),
    (
      lambda: call(PRUNED, IMAGES, jnp.ones((1, B, 16))),
      r'decisions.shape=.*\(2, 3, 16\)',
    ),
    (
      lambda: call(*(pruned(score='structural'), IMAGES, jnp.ones((1, B, 16)))),
      "score='structural'.*decides",
    ),
    (
      lambda: call(adapted(), IMAGES, build={'learners': 3}),
      'learners=3: expected 0 to 2',
    ),
    (
      lambda: acmize(DETRConfig(), {}),
      'model=.DETRConfig.: .*no adaptive modules',
    ),
    (
      lambda: resize_positions(jnp.zeros((17, 3)), 2, 4),
      'embeddings=17: .*square.*first 2',
    ),
  ],
)
def test_calls_that_do_not_fit(run, named):
  with pytest.raises(UserError, match=named):
    run()

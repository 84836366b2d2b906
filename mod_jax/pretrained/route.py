"""Makes a routed model from a pretrained dense one."""

import dataclasses
import functools
import os
from typing import Any, Literal

from flax import linen as nn
import jax

from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.errors import UserError
from mod_jax.layers.reduction import EViT, ToMe
from mod_jax.layers.routing_config import (
  LIKE_DENSE,
  MoDConfig,
  VisionRoutingConfig,
)
from mod_jax.models import acm, lm, protocol, vlm
from mod_jax.models.dynamic_vit import DynamicViTConfig, equal_stages
from mod_jax.models.lm import LMConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.pretrained.load import Run, load, require_floats
from mod_jax.tasks import MODALITIES, make_task

Method = Literal[
  *('amod', 'mod', 'dynamic', 'tome', 'evit', 'acm', 'pmod', 'gamma')
]
# Methods without a capacity, and what they have instead.
_WITHOUT_CAPACITY = {
  'tome': 'it merges a number of tokens in each block; give r=8 instead',
  'pmod': 'its capacity falls over the blocks by a schedule; leave it out',
  'acm': 'its gates are trained to a budget, objective.budget; leave it out',
}


def route(
  pretrained: Run | str | os.PathLike,
  method: Method = 'amod',
  *,
  capacity: float | None = None,
  key: jax.Array | None = None,
  **fields: Any,
) -> Run:
  """Returns a routed model with the weights of a dense one.

  Added parameters (routers, prediction heads, learners) are newly initialised,
  so train the model before use: export it, and give that folder as `init` of a
  run. A-MoD, ToMe and EViT add no parameters.

  Args:
    pretrained: the dense model, or a path as `load` takes it.
    method: `amod` routes tokens by attention, without parameters, in models of
      images and speech; `mod` routes tokens by a learned router, also in
      language models; `dynamic` drops patches by prediction heads (DynamicViT);
      `tome` merges similar tokens (ToMe), and `evit` fuses tokens to which the
      class token does not attend (EViT), both without parameters; `acm` splits
      layers into learners. `pmod` and `gamma` route the image tokens of
      vision-language models (p-MoD, and γ-MoD, which also routes instructions).
    capacity: fraction of the tokens that a routed block processes or, with
      `dynamic` and `evit`, that each stage keeps; None for the method's
      default. Three methods have no capacity: `acm` is trained for a budget,
      `tome` merges `r` pairs in each block, and `pmod` has a schedule.
    key: random key for the new parameters; None means `jax.random.key(0)`.
    **fields: fields of the method's config: `VisionRoutingConfig` or
      `MoDConfig`, `DynamicViTConfig`, `ToMe`, `EViT`, `AdaptiveConfig`.

  Raises:
    UserError: the model is not dense, has adapters or int8 weights, or does not
      support the method; or a field is wrong.
  """
  run = pretrained if isinstance(pretrained, Run) else load(pretrained)
  require_floats(run)
  if run.config.lora is not None:
    raise UserError(
      'route: this model has low-rank adapters: export it, which merges them,'
      ' and give that folder.'
    )
  if run.config != run.config.dense_twin():
    raise UserError(
      'route: this model is conditional already; give a dense one, such as the'
      ' run that it was made from.'
    )
  methods = {
    'amod': _amod,
    'mod': _mod,
    'dynamic': _dynamic,
    'tome': _tome,
    'evit': _evit,
    'acm': None,  # See below.
    'pmod': functools.partial(_routed, vlm.P_MOD),
    'gamma': _gamma,
  }
  config_lib.choose(method, methods, 'method')
  if method not in (allowed := run.config.route_methods):
    raise UserError(
      f'method={method!r} is not for {run.config.noun}: take one of'
      f' {", ".join(allowed)}.'
    )
  if capacity is not None and method in _WITHOUT_CAPACITY:
    raise UserError(
      f'capacity={capacity} and method={method!r}: {_WITHOUT_CAPACITY[method]}.'
    )
  if capacity is not None:
    fields = {
      'keep' if method in ('dynamic', 'evit') else 'capacity': capacity,
      **fields,
    }
  key = jax.random.key(0) if key is None else key
  if method == 'acm':
    config, params, _ = acm.acmize(
      run.config, run.variables['params'], key=key, **fields
    )
    variables = dict(run.variables) | {'params': params}
  else:
    config = methods[method](run.config, fields)
    variables = _completed(config, run.config, dict(run.variables), key)
  changed = {'config': config, 'variables': variables}
  if run.experiment is not None:
    experiment = dataclasses.replace(
      run.experiment, model=config, objective=None
    )
    changed |= {'experiment': experiment, 'task': make_task(experiment)}
  reads = isinstance(config, LMConfig | VLMConfig)
  if reads and run.task is not None:
    changed['task'].modality.use_tokenizer(*run.task.modality.tokenizer_source)
  if isinstance(config, Wav2Vec2Config) and run.task is not None:
    # Take the vocabulary beside the weights: the data may have been moved.
    changed['task'].modality.vocabulary = run.task.modality.vocabulary
  return dataclasses.replace(run, **changed)


def _amod(config, fields):
  return _routed(VisionRoutingConfig(score='attention'), config, fields)


def _mod(config, fields):
  fields = {**LIKE_DENSE, **fields}
  if isinstance(config, LMConfig):
    return _routed(MoDConfig(), config, fields)
  return _routed(VisionRoutingConfig(score='learned'), config, fields)


def _gamma(config, fields):
  fields = {'layers': vlm.gamma_layers(config.num_layers), **fields}
  return _routed(vlm.GAMMA_MOD, config, fields)


def _routed(routing, config, fields):
  return config.with_parts(routing=config_lib.replace(routing, fields))


def _dynamic(config, fields):
  # The default stages do not fit backbones of few blocks.
  stages = fields.pop('stages', None) or equal_stages(config.num_layers)
  model = DynamicViTConfig(backbone=config, stages=stages)
  return config_lib.replace(model, fields)


def _tome(config, fields):
  reduction = config_lib.replace(ToMe(), fields)
  return dataclasses.replace(config, reduction=reduction)


def _evit(config, fields):
  # The default stages do not fit models of few blocks.
  stages = fields.pop('stages', None) or equal_stages(config.num_layers)
  reduction = config_lib.replace(EViT(stages=stages), fields)
  return dataclasses.replace(config, reduction=reduction)


def _completed(config, of, source, key):
  """Returns `source`, variables of the model `of`, and new ones of `config`."""
  if protocol.shapes(config) == protocol.shapes(of):
    return source
  keys = dict(zip(('params', 'routing'), jax.random.split(key), strict=True))
  fresh = dict(nn.unbox(jax.jit(config.build().init)(keys, config.example())))
  merge = trees.merge
  if isinstance(config, LMConfig):
    merge = functools.partial(lm.merge, config, of)
  params = merge(
    fresh['params'],
    source['params'],
    new=MODALITIES[type(config)].optional,
    describe='the dense model',
  )
  return fresh | source | {'params': params}

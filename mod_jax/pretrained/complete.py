"""Completes configs from the files that they name: sizes, classes, vocabulary.

Config files call these functions in their `complete`; see `cli.load_config`.
"""

import dataclasses

from mod_jax.data import images as images_lib
from mod_jax.data import text
from mod_jax.errors import UserError
from mod_jax.models.dynamic_vit import DynamicViTConfig, equal_stages
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.pretrained.load import Run, about
from mod_jax.tasks.experiment import ExperimentConfig

# Fields of a model that are kept when it takes over pretrained weights.
_OWN = ('routing', 'experts', 'adaptive', 'lora', 'dtype', 'remat')
_OWN_OF_IMAGES = (*_OWN, 'reduction')
_OWN_OF_TEXTS = (*_OWN, 'attention', 'scan_layers', 'early_exit', 'early_loss')


def images(
  config: ExperimentConfig, *, image_size: int | None = None
) -> ExperimentConfig:
  """Completes the config of a vision run from its pictures and weights.

  The model gets as many classes as the data have. The model's sizes and the
  preprocessing come from the weights at `config.init`, if given. `config.dense`
  is the phase that trains a dense model first. It is kept if there is no
  `init`, or if the method distils from a dense model and the weights at `init`
  have other classes than the data, so they cannot be that dense model.

  Args:
    config: the experiment.
    image_size: side of the images in pixels; None for that of the weights'
      preprocessing or, without `init`, of the data's config.
  """
  classes = images_lib.class_names(config.data)
  model, data, dense = config.model, config.data, config.dense
  backbone = getattr(model, 'backbone', model)
  same_classes = False
  if config.init is not None:
    run = _about(config.init, of_text=False)
    pretrained = run.config.dense_twin()
    same_classes = run.classes == classes
    if run.classes is None:
      same_classes = pretrained.num_classes == len(classes)
    data = run.reading_as_trained(data)
    kept_fields = (*_OWN_OF_IMAGES, 'stochastic_depth')
    backbone = _with_own(pretrained, backbone, kept_fields)
  size = image_size or data.image_size
  data = dataclasses.replace(data, image_size=size)
  backbone = dataclasses.replace(
    backbone, image_size=size, num_classes=len(classes)
  )
  if isinstance(model, DynamicViTConfig):
    depth = backbone.num_layers
    stages = equal_stages(depth, min(len(model.stages), depth - 1))
    model = dataclasses.replace(model, backbone=backbone, stages=stages)
    needs_teacher = True
  else:
    model = _with_own(backbone, model, _OWN_OF_IMAGES)
    needs_teacher = model.adaptive is not None
  if config.init is not None and not (needs_teacher and not same_classes):
    dense = None
  return dataclasses.replace(config, model=model, data=data, dense=dense)


def language(config: ExperimentConfig) -> ExperimentConfig:
  """Completes the config of a language run from its tokenizer and weights.

  The size of the vocabulary is the tokenizer's. If `config.init` has weights,
  sizes and tokenizer are those of the weights, and `config.dense` becomes None.
  """
  model, data = config.model, config.data
  if config.init is not None:
    run = _about(config.init, of_text=True)
    data = run.reading_as_trained(data)
    model = _with_own(run.config, model, _OWN_OF_TEXTS)
    return dataclasses.replace(config, model=model, data=data, dense=None)
  # A tokenizer that is yet to be learned will have `tokenizer_vocab_size`.
  size = data.tokenizer_vocab_size
  if not data.learns_tokenizer:
    size = text.make_tokenizer(data).vocab_size
  return dataclasses.replace(
    config, model=dataclasses.replace(model, vocab_size=size)
  )


def _with_own(model, source, names):
  return dataclasses.replace(
    model, **{name: getattr(source, name) for name in names}
  )


def _about(init: str, *, of_text: bool) -> Run:
  run = about(init)
  wanted = (LMConfig if of_text else ViTConfig).noun
  found = run.config.dense_twin().noun
  if found != wanted:
    raise UserError(f'init={init} is {found}: give {wanted}.')
  return run

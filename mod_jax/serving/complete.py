"""What a config leaves to the files that it names: sizes, classes, words.

The functions here are for the `complete` of a config file; see
`cli.load_config`.
"""

import dataclasses
from typing import Any

from mod_jax.data import images as images_lib
from mod_jax.data import text
from mod_jax.errors import UserError
from mod_jax.models.dynamic_vit import DynamicViTConfig, equal_stages
from mod_jax.models.lm import LMConfig
from mod_jax.serving.run import about
from mod_jax.tasks.experiment import ExperimentConfig

# Fields of a model that are not about the weights that it starts from.
_OWN = ('routing', 'experts', 'adaptive', 'dtype', 'remat')


def images(
  config: ExperimentConfig, *, image_size: int | None = None
) -> ExperimentConfig:
  """Returns the config of a vision run over the pictures that it names.

  The model has as many classes as the data. Its sizes, and what becomes of the
  pictures, are those of the weights at `config.init`, if it names any. A dense
  model is trained first, if `config.dense` says how, where there are no such
  weights, or where the method learns from a dense model of the same classes and
  they are of others.

  Args:
    config: the experiment.
    image_size: pixels a side; None for what the weights were trained with.

  Raises:
    UserError: there are no such pictures or weights.
  """
  classes = images_lib.class_names(config.data)
  model, data, dense = config.model, config.data, config.dense
  backbone = getattr(model, 'backbone', model)
  of_our_classes = False
  if config.init is not None:
    fields = _about(config.init, of_text=False)
    found = fields['config'].dense_twin()
    known = fields.get('classes')
    of_our_classes = found.num_classes == len(classes)
    if known is not None:
      of_our_classes = known == classes
    data = fields['preprocess'].apply_to(data)
    own = (*_OWN, 'stochastic_depth')
    backbone = _with_own(found, backbone, own)
  size = image_size or data.image_size
  data = dataclasses.replace(data, image_size=size)
  backbone = dataclasses.replace(
    backbone, image_size=size, num_classes=len(classes)
  )
  if isinstance(model, DynamicViTConfig):
    depth = backbone.num_layers
    stages = equal_stages(depth, min(len(model.stages), depth - 1))
    model = dataclasses.replace(model, backbone=backbone, stages=stages)
    taught = True
  else:
    model = _with_own(backbone, model, _OWN)
    taught = model.adaptive is not None
  if config.init is not None and not (taught and not of_our_classes):
    dense = None
  return dataclasses.replace(config, model=model, data=data, dense=dense)


def language(config: ExperimentConfig) -> ExperimentConfig:
  """Returns the config of a language run over the texts that it names.

  Its vocabulary is the tokenizer's. With weights at `config.init`, sizes and
  tokenizer are theirs, and no dense model is trained first.

  Raises:
    UserError: there is no such tokenizer or corpus, or there are no weights.
  """
  model, data = config.model, config.data
  if config.init is not None:
    fields = _about(config.init, of_text=True)
    if data.source != 'prepared':
      kind, path = fields['task'].modality.tokenizer_source
      data = dataclasses.replace(data, tokenizer=kind, tokenizer_path=path)
    model = _with_own(fields['config'], model, (*_OWN, 'attention'))
    return dataclasses.replace(config, model=model, data=data, dense=None)
  # One that is learned is not learned yet, and has as many as it shall have.
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


def _about(init: str, *, of_text: bool) -> dict[str, Any]:
  fields = about(init)
  if isinstance(fields['config'], LMConfig) != of_text:
    kinds = ('a vision transformer', 'a language model')
    raise UserError(
      f'init={init} is {kinds[not of_text]}: give {kinds[of_text]}.'
    )
  return fields

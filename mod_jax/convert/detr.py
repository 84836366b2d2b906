"""DETR in Hugging Face's naming, with a backbone of Hugging Face or timm."""

from collections.abc import Mapping, Sequence
import dataclasses
import os
import pathlib
import re
from typing import Any, Literal

import numpy as np

from mod_jax import config as config_lib
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import files
from mod_jax.convert.arrays import Entry
from mod_jax.convert.files import Lazy
from mod_jax.errors import UserError
from mod_jax.layers.resnet import EXPANSION, ResNetConfig
from mod_jax.models.detr import DETRConfig

Naming = Literal['huggingface', 'timm']  # Library of the backbone.

# Patterns of the parameters that a model has and its dense twin has not.
ROUTING = (r'(encoder|decoder)/block_\d+/(source/)?router/.*',)

_ATTENTION = {'query': 'q_proj', 'key': 'k_proj', 'value': 'v_proj'} | {
  'out': 'out_proj'
}
_TABLE = {
  'queries': 'model.query_position_embeddings.weight',
  'project': 'model.input_projection.',
  'norm': 'model.decoder.layernorm.',
  'classes': 'class_labels_classifier.',
  **{f'box_{i}': f'bbox_predictor.layers.{i}.' for i in range(3)},
  **{
    f'{stack}/block_{{}}/{ours}': f'model.{stack}.layers.{{}}.{theirs}.'
    for stack in ('encoder', 'decoder')
    for ours, theirs in {
      'attention_norm': 'self_attn_layer_norm',
      'cross_attention_norm': 'encoder_attn_layer_norm',
      'mlp_norm': 'final_layer_norm',
      'mlp/up': 'fc1',
      'mlp/down': 'fc2',
      **{f'attention/{k}': f'self_attn.{v}' for k, v in _ATTENTION.items()},
      **{
        f'cross_attention/{k}': f'encoder_attn.{v}'
        for k, v in _ATTENTION.items()
      },
    }.items()
  },
}
# Substitutions that turn names in transformers 5's modules into names in files.
_RENAMED = (
  (
    r'^model\.backbone\.(model\.)?(?!conv_encoder)',
    _BACKBONE := ('model.backbone.conv_encoder.model.'),
  ),
  (r'\.o_proj\.', '.out_proj.'),
  (r'\.mlp\.(fc[12])\.', r'.\1.'),
)
_UNUSED = (r'.*\.num_batches_tracked',)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Backbone:
  """Fields of the backbone's config that no array shows."""

  hidden_act: Literal['relu'] = 'relu'
  downsample_in_first_stage: Literal[False] = False
  downsample_in_bottleneck: Literal[False] = False
  output_stride: Literal[32] | None = None  # timm's; below 32, it is dilated.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """The fields that are read from a config, with Hugging Face's defaults."""

  encoder_attention_heads: config_lib.Size = 8
  decoder_attention_heads: config_lib.Size = 8
  activation_function: Literal['relu'] = 'relu'
  position_embedding_type: Literal['sine'] = 'sine'
  # transformers 4 writes None if the backbone is not timm's.
  dilation: Literal[False] | None = False
  num_channels: Literal[3] = 3
  # If True, transformers also normalises features between decoder layers.
  auxiliary_loss: Literal[False] = False


# Files with an array of this name have timm's backbone.
_OF_TIMM = f'{_BACKBONE}conv1.weight'


def names(config: DETRConfig, naming: Naming) -> tuple[Entry, ...]:
  """Returns the table that maps the arrays in Hugging Face's files to ours.

  Routers are left out. Raises UserError if Hugging Face has no such model.
  """
  dense = config.dense_twin()
  fields = {
    'backbone': (type(dense.backbone), ResNetConfig),
    'patch_size': (dense.patch_size, 1),
    **{
      name: (getattr(dense, name), getattr(DETRConfig, name))
      for name in ('place_tokens', 'place_temperature', 'norm_epsilon')
    },
  }
  for name, (value, theirs) in fields.items():
    if value != theirs:
      raise UserError(
        f'{name}={value}: a DETR of Hugging Face has {theirs}; this model'
        ' cannot be converted.'
      )
  table = _TABLE | _backbone(dense.backbone, naming)
  return arrays_lib.entries(arrays_lib.shapes_of(dense), table, 'Hugging Face')


def _backbone(config: ResNetConfig, naming: Naming) -> dict[str, str]:
  """Returns a table from our names of the backbone's modules to `naming`'s."""

  table = {}

  def add(ours, timm, theirs):
    """Adds the names of a convolution and its norm.

    `timm` has timm's two names; `theirs` begins both names of Hugging Face.
    """
    pair = (f'{theirs}.convolution', f'{theirs}.normalization')
    pair = timm if naming == 'timm' else pair
    for kind, module in zip(('conv', 'norm'), pair, strict=True):
      table[f'backbone/{ours}_{kind}'] = f'{_BACKBONE}{module}.'

  add('stem', ('conv1', 'bn1'), 'embedder.embedder')
  for stage, depth in enumerate(config.depths):
    for i in range(depth):
      ours, timm = f'stage_{stage}_{i}', f'layer{stage + 1}.{i}'
      theirs = f'encoder.stages.{stage}.layers.{i}'
      for j in range(3):
        pair = f'{timm}.conv{j + 1}', f'{timm}.bn{j + 1}'
        add(f'{ours}_{j}', pair, f'{theirs}.layer.{j}')
      pair = f'{timm}.downsample.0', f'{timm}.downsample.1'
      add(f'{ours}_short', pair, f'{theirs}.shortcut')
  return table


def on_disk(name: str) -> str:
  """Converts an array's name in transformers' modules to the name in files."""
  for old, new in _RENAMED:
    name = re.sub(old, new, name)
  return name


def derive(path: str | os.PathLike) -> DETRConfig:
  """Returns the config of the model in a folder of Hugging Face.

  The number of attention heads comes from `config.json`, other sizes from the
  arrays. Images are padded to 1333 × 1333 pixels: the published preprocessing
  makes no side longer. Raises UserError if a setting is not supported.
  """
  arrays = _read(path)
  where = f'{path}/config.json'
  fields = files.config_json(path)
  told = config_lib.from_known(_Fields, fields, where)
  for name in ('backbone_config', 'backbone_kwargs'):
    if isinstance(backbone := fields.get(name), dict):
      config_lib.from_known(_Backbone, backbone, f'{where}: {name}')
  heads = told.encoder_attention_heads
  if told.decoder_attention_heads != heads:
    raise UserError(
      f'{where}: encoder_attention_heads={heads} and decoder_attention_heads='
      f'{told.decoder_attention_heads}: a DETR here has one number for both.'
    )

  def count(pattern):
    return len({m[1] for m in map(re.compile(pattern).match, arrays) if m})

  if _OF_TIMM in arrays:
    stem, stages, block = 'conv1', r'layer(\d+)\.', 'layer{}.{}.conv2'
    offset = 1
  else:
    stem, offset = 'embedder.embedder.convolution', 0
    stages = r'encoder\.stages\.(\d+)\.'
    block = 'encoder.stages.{}.layers.{}.layer.1.convolution'
  prefix = re.escape(_BACKBONE)
  try:
    depths, widths = [], []
    for stage in range(offset, offset + count(prefix + stages)):
      inner = re.escape(_BACKBONE + block.format(stage, '#')).replace(
        r'\#', r'(\d+)'
      )
      depths.append(count(inner))
      first = _BACKBONE + block.format(stage, 0) + '.weight'
      widths.append(len(arrays[first]))
    num_queries, width = arrays[_TABLE['queries']].shape
    return DETRConfig(
      image_size=(1333, 1333),
      num_classes=len(arrays['class_labels_classifier.bias']) - 1,
      num_queries=num_queries,
      width=width,
      num_heads=heads,
      mlp_dim=len(arrays['model.encoder.layers.0.fc1.bias']),
      num_layers=count(r'model\.encoder\.layers\.(\d+)\.'),
      num_decoder_layers=count(r'model\.decoder\.layers\.(\d+)\.'),
      backbone=ResNetConfig(
        stem=len(arrays[f'{_BACKBONE}{stem}.weight']),
        depths=tuple(depths),
        widths=tuple(widths),
      ),
    )
  except (KeyError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(
      f'{path} lacks {error.args[0]!r}, or has it in another shape: it may be'
      ' cut short, so fetch it again.'
    ) from error


def their_config(config: DETRConfig, names: Sequence[str]) -> dict[str, Any]:
  """Returns the fields of the `config.json` for weights that `save` writes.

  `names` has the classes' names in the order of the logits, '' for a logit
  without a class. Names may be fewer than `config.num_classes`.
  """
  backbone = config.backbone
  sides = {
    f'{side}_{field}': value
    for side, layers in (
      ('encoder', config.num_layers),
      ('decoder', config.num_decoder_layers),
    )
    for field, value in (
      ('layers', layers),
      ('attention_heads', config.num_heads),
      ('ffn_dim', config.mlp_dim),
    )
  }
  # Placeholders must differ: they are keys of `label2id` below.
  shown = [f'N/A {i}' for i in range(config.num_classes)]
  for i, name in enumerate(names):
    shown[i] = name or shown[i]
  return {
    'architectures': ['DetrForObjectDetection'],
    'model_type': 'detr',
    **{'d_model': config.width, 'num_queries': config.num_queries},
    **sides,
    'activation_function': 'relu',
    'position_embedding_type': 'sine',
    **{'dropout': config.dropout, 'num_channels': 3, 'dilation': False},
    # The file has the backbone's weights too, so none are to be downloaded.
    **{'use_timm_backbone': False, 'use_pretrained_backbone': False},
    'backbone': None,
    'backbone_config': {
      'model_type': 'resnet',
      'layer_type': 'bottleneck',
      'hidden_act': 'relu',
      'num_channels': 3,
      'embedding_size': backbone.stem,
      'depths': list(backbone.depths),
      'hidden_sizes': [EXPANSION * width for width in backbone.widths],
      'out_features': [f'stage{len(backbone.depths)}'],
    },
    'id2label': {str(i): name for i, name in enumerate(shown)},
    'label2id': {name: i for i, name in enumerate(shown)},
  }


def _read(path) -> dict[str, np.ndarray]:
  return {on_disk(name): x for name, x in files.read(path).items()}


def read(path: str | os.PathLike, config: DETRConfig) -> dict[str, Lazy]:
  """Returns the variables of a model's dense twin by name, from a file.

  `path` is a file of weights of Hugging Face, or a folder with such a file.
  """
  arrays = _read(path)
  entries = names(config, 'timm' if _OF_TIMM in arrays else 'huggingface')
  return arrays_lib.read(
    *(entries, arrays),
    dropped=_UNUSED,
    describe=f'{path}, a DETR of Hugging Face,',
  )


def save(
  path: str | os.PathLike,
  variables: Mapping[str, Any],
  config: DETRConfig,
) -> None:
  """Writes the weights of a model's dense twin in Hugging Face's naming.

  transformers' DetrForObjectDetection can load the file if a `config.json` is
  beside it. The backbone has Hugging Face's names; published files have timm's.
  """
  entries = names(config, 'huggingface')
  files.check_suffix(pathlib.Path(path))
  flat = arrays_lib.flatten(variables)
  written = arrays_lib.arrays(entries, flat, {}, dropped=ROUTING)
  files.write(path, {name: make() for name, _, make in written})

"""Vision transformers in the naming of other libraries.

Supports timm (also used by DeiT's releases), Hugging Face, torchvision, and the
original code of LV-ViT and DynamicViT. A table for each library maps its arrays
to ours; `load` and `save` use it to convert in either direction.
"""

from collections.abc import Mapping
import dataclasses
import math
import os
import pathlib
import re
from typing import Any, Literal

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import beside, files
from mod_jax.convert.arrays import Entry
from mod_jax.convert.files import Lazy
from mod_jax.errors import UserError
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models import vit
from mod_jax.models.dynamic_vit import DynamicViTConfig, equal_stages
from mod_jax.models.vit import ViTConfig

Config = ViTConfig | DynamicViTConfig
Naming = Literal['timm', 'huggingface', 'torchvision', 'lvvit', 'dynamicvit']

# Patterns of the parameters that a model has and its dense twin has not.
ROUTING = (
  r'(block_\d+/)?(router|predictor)/.*',
  r'(prediction|pattern)_\d+(/.*)?',
)


# Fields in which only CLIP's towers have other values; see `convert.clip`.
_PLAIN = {'activation': 'gelu', 'patch_bias': True, 'input_norm': False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Library:
  """How a library names the arrays of its models.

  Attributes:
    label: name of the library, for messages.
    table: maps our names to the library's, for `arrays.entries`.
    required: fields of a `ViTConfig` that have the same value for all models of
      the library, with that value.
    unused: patterns of names of arrays to ignore.
  """

  label: str
  table: Mapping[str, str]
  required: Mapping[str, Any]
  unused: tuple[str, ...] = ()


_TIMM = _Library(
  label='timm',
  table={
    'class_token': 'cls_token',
    'distillation_token': 'dist_token',
    'position': 'pos_embed',
    'patch': 'patch_embed.proj.',
    'block_{}/attention_norm': 'blocks.{}.norm1.',
    'block_{}/attention/qkv': 'blocks.{}.attn.qkv.',
    'block_{}/attention/out': 'blocks.{}.attn.proj.',
    'block_{}/mlp_norm': 'blocks.{}.norm2.',
    'block_{}/mlp/up': 'blocks.{}.mlp.fc1.',
    'block_{}/mlp/down': 'blocks.{}.mlp.fc2.',
    'norm': 'norm.',
    'head': 'head.',
    'head_distilled': 'head_dist.',
  },
  required={'residual_scale': 1.0, 'stem': None, 'distillation_head': True},
)
# Names lack the prefix `vit.` or `deit.`, which only some classes have.
_HUGGING_FACE = _Library(
  label='Hugging Face',
  table={
    'class_token': 'embeddings.cls_token',
    'distillation_token': 'embeddings.distillation_token',
    'position': 'embeddings.position_embeddings',
    'patch': 'embeddings.patch_embeddings.projection.',
    'block_{}/attention_norm': 'encoder.layer.{}.layernorm_before.',
    'block_{}/attention/query': 'encoder.layer.{}.attention.attention.query.',
    'block_{}/attention/key': 'encoder.layer.{}.attention.attention.key.',
    'block_{}/attention/value': 'encoder.layer.{}.attention.attention.value.',
    'block_{}/attention/out': 'encoder.layer.{}.attention.output.dense.',
    'block_{}/mlp_norm': 'encoder.layer.{}.layernorm_after.',
    'block_{}/mlp/up': 'encoder.layer.{}.intermediate.dense.',
    'block_{}/mlp/down': 'encoder.layer.{}.output.dense.',
    'norm': 'layernorm.',
    'head': 'classifier.',
    'head_distilled': 'distillation_classifier.',
  },
  required={'residual_scale': 1.0, 'stem': None},
  # Arrays for other tasks than classification.
  unused=(r'pooler\..*', r'embeddings\.mask_token'),
)
_TORCHVISION = _Library(
  label='torchvision',
  table={
    'class_token': 'class_token',
    'position': 'encoder.pos_embedding',
    'patch': 'conv_proj.',
    'block_{}/attention_norm': 'encoder.layers.encoder_layer_{}.ln_1.',
    'block_{}/attention/qkv': (
      'encoder.layers.encoder_layer_{}.self_attention.in_proj_'
    ),
    'block_{}/attention/out': (
      'encoder.layers.encoder_layer_{}.self_attention.out_proj.'
    ),
    'block_{}/mlp_norm': 'encoder.layers.encoder_layer_{}.ln_2.',
    'block_{}/mlp/up': 'encoder.layers.encoder_layer_{}.mlp.0.',
    'block_{}/mlp/down': 'encoder.layers.encoder_layer_{}.mlp.3.',
    'norm': 'encoder.ln.',
    'head': 'heads.head.',
  },
  required={'residual_scale': 1.0, 'stem': None, 'qkv_bias': True},
)
# The code of Jiang et al. 2021, in timm's naming except for the stem and the
# head of the patch tokens.
_LV_VIT = _Library(
  label='LV-ViT',
  table={k: v for k, v in _TIMM.table.items() if 'distill' not in k}
  | {
    'head_tokens': 'aux_head.',
    'stem/conv_0': 'patch_embed.conv1.',
    'stem/conv_1': 'patch_embed.conv2.',
    'stem/conv_2': 'patch_embed.conv3.',
    'stem/norm_0': 'patch_embed.bn1.',
    'stem/norm_1': 'patch_embed.bn2.',
    'stem/norm_2': 'patch_embed.bn3.',
  },
  required={},
  # PyTorch's counter of batches, which we do not need.
  unused=(r'patch_embed\.bn\d+\.num_batches_tracked',),
)
_LIBRARIES = {
  'timm': _TIMM,
  'huggingface': _HUGGING_FACE,
  'torchvision': _TORCHVISION,
  'lvvit': _LV_VIT,
}
# Names of prediction heads in the code of Rao et al. 2021. Its other names are
# those of timm or, with an LV-ViT backbone, of LV-ViT.
_PREDICTIONS = {
  'prediction_{}/norm': 'score_predictor.{}.in_conv.0.',
  'prediction_{}/linear_0': 'score_predictor.{}.in_conv.1.',
  'prediction_{}/linear_1': 'score_predictor.{}.out_conv.0.',
  'prediction_{}/linear_2': 'score_predictor.{}.out_conv.2.',
  'prediction_{}/linear_3': 'score_predictor.{}.out_conv.4.',
}
# Patterns of prefixes that differ between Hugging Face's model classes (ViT,
# DeiT, with or without a distillation token), and their replacements.
_RENAMED = ((r'^cls_classifier\.', 'classifier.'), (r'^(vit|deit)\.', ''))
# Parts of Hugging Face's names: in files, and in transformers 5's modules.
_IN_MEMORY = (
  ('encoder.layer.', 'layers.'),
  ('.attention.attention.query.', '.attention.q_proj.'),
  ('.attention.attention.key.', '.attention.k_proj.'),
  ('.attention.attention.value.', '.attention.v_proj.'),
  ('.attention.output.dense.', '.attention.o_proj.'),
  ('.intermediate.dense.', '.mlp.fc1.'),
  ('.output.dense.', '.mlp.fc2.'),
)


def names(config: Config, naming: Naming) -> tuple[Entry, ...]:
  """Returns the table that maps a library's arrays to ours.

  The table has all arrays of the dense model and, with naming 'dynamicvit', the
  prediction heads of a `DynamicViTConfig`, but no routers. Our names that begin
  with `batch_stats/` belong to that collection; all others are parameters.
  Names of Hugging Face lack the prefix of the model class.

  Raises:
    UserError: the naming is unknown, or the library has no such model.
  """
  dense = config.dense_twin()
  library = _library(naming, dense.stem is not None)
  for field, required in {**_PLAIN, **library.required}.items():
    if (value := getattr(dense, field)) != required:
      raise UserError(
        f'{field}={value}: vision transformers of {library.label} have'
        f' {field}={required}; use another naming.'
      )
  stem = dense.stem
  of_lv_vit = stem and stem == ConvStemConfig(width=stem.width)
  if 'stem/conv_0' in library.table and not of_lv_vit:
    raise UserError(
      f'stem={stem}: the stem of an LV-ViT has three convolutions, of which the'
      ' first halves the picture; for a model without a stem, use naming'
      " 'timm'."
    )
  ours = arrays_lib.shapes_of(dense)
  if naming == 'dynamicvit':
    shapes = arrays_lib.shapes_of(config).items()
    ours = ours | {k: x for k, x in shapes if k.startswith('prediction_')}
  channels = 3 if dense.stem is None else dense.stem.width
  return arrays_lib.entries(ours, library.table, library.label, channels)


def _library(naming: Naming, stem: bool) -> _Library:
  if naming != 'dynamicvit':
    return config_lib.choose(naming, _LIBRARIES, 'naming')
  library = _LV_VIT if stem else _TIMM
  table = {k: v for k, v in library.table.items() if 'distill' not in k}
  return dataclasses.replace(
    library, label='DynamicViT', table=table | _PREDICTIONS
  )


# Number of attention heads by width, in all published ViTs and DeiTs.
_USUAL_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}
# Epsilon of the layer norms by naming, if no JSON file has it; else 1e-6.
_EPSILON = {'huggingface': 1e-12, 'lvvit': 1e-5}


@dataclasses.dataclass(frozen=True)
class _File:
  """A file's arrays by name, without the prefixes of Hugging Face's classes."""

  path: pathlib.Path
  naming: Naming
  library: _Library
  arrays: dict[str, np.ndarray]

  @property
  def has_stem(self) -> bool:
    return _STEM in self.arrays

  def array(self, module: str, suffix: str = '', rank: int | None = None):
    """Returns the array of our module `module`; `{}` in the name means block 0.

    `suffix`, such as `weight`, is appended to the library's name of the module.
    Returns None if there is no such array, or its rank is not `rank`.
    """
    name = self.library.table.get(module, '').format(0) + suffix
    array = self.arrays.get(name)
    return None if rank and getattr(array, 'ndim', 0) != rank else array

  def numbers(self, module: str) -> set[int]:
    """Returns the numbers in place of `{}` in the file's names of `module`."""
    prefix = self.library.table.get(module, '{}').partition('{}')[0]
    pattern = re.compile(re.escape(prefix) + r'(\d+)\.')
    return {int(m[1]) for m in map(pattern.match, self.arrays) if m}

  def sizes(self) -> dict[str, Any]:
    """Returns the fields of a `ViTConfig` that the arrays' shapes determine.

    For DynamicViT, there is also `stages`, the number of prediction heads.
    """
    sizes = {}
    distilled = self.array('distillation_token') is not None
    patch = self.array('patch', 'weight', 4)
    if patch is not None:
      # The stem halves the resolution before the patch embedding.
      side = patch.shape[2] * (1 + self.has_stem)
      sizes |= {'width': len(patch), 'patch_size': side}
    sizes['num_layers'] = len(self.numbers('block_{}/mlp/up'))
    if (up := self.array('block_{}/mlp/up', 'weight', 2)) is not None:
      sizes['mlp_dim'] = len(up)
    if (head := self.array('head', 'bias', 1)) is not None:
      sizes['num_classes'] = len(head)
    position = self.array('position', rank=3)
    if patch is not None and position is not None:
      patches = max(position.shape[1] - 1 - distilled, 0)
      if math.isqrt(patches) ** 2 == patches:
        sizes['image_size'] = math.isqrt(patches) * side
    sizes['distilled'] = distilled
    if self.naming == 'dynamicvit':
      sizes['stages'] = len(self.numbers('prediction_{}/norm'))
    return sizes


_STEM = _LV_VIT.table['stem/conv_0'] + 'weight'


def _read(path: str | os.PathLike) -> _File:
  """Reads a file, and recognises its naming; UserError if there is none."""
  path = files.find(path)
  arrays = files.read(path)
  if any(name.startswith('score_predictor.') for name in arrays):
    naming = 'dynamicvit'
  elif _STEM in arrays:
    naming = 'lvvit'
  else:
    bare = {re.sub(r'^(vit|deit)\.', '', name) for name in arrays}
    naming = next(
      (n for n, x in _LIBRARIES.items() if x.table['patch'] + 'weight' in bare),
      None,
    )
    if naming is None:
      first_names = ', '.join(sorted(arrays)[:3]) or 'nothing'
      raise UserError(
        f'{path} holds no vision transformer as timm, Hugging Face or'
        f' torchvision name it; its first names are {first_names}: convert it'
        ' to one of these.'
      )
  if naming == 'huggingface':
    arrays = {on_disk(name): array for name, array in arrays.items()}
  return _File(path, naming, _library(naming, _STEM in arrays), arrays)


def on_disk(name: str) -> str:
  """Converts a name in Hugging Face's files or modules to that in `names`."""
  for old, new in _RENAMED:
    name = re.sub(old, new, name)
  for disk, memory in _IN_MEMORY:
    name = name.replace(memory, disk)
  return name


def in_memory(name: str, config: Config) -> str:
  """Converts a name in `names` to the name in transformers 5's modules."""
  for disk, memory in _IN_MEMORY:
    name = name.replace(disk, memory)
  return _prefixed(name, config.dense_twin())


def _prefixed(name: str, dense: ViTConfig) -> str:
  """Adds the prefix of Hugging Face's model class to a name in `names`."""
  if name.startswith('classifier.'):
    return f'cls_{name}' if dense.has_distillation_head else name
  if name.startswith('distillation_classifier.'):
    return name
  return ('deit.' if dense.distilled else 'vit.') + name


def derive(path: str | os.PathLike, **known) -> Config:
  """Returns the config of the model in a file of weights.

  Sizes are taken from the arrays' shapes, and other fields from the JSON files
  beside the weights. If these files do not tell the number of heads, it is the
  usual one for the width, with a warning.

  Args:
    path: a file of weights or a model's directory, as for `load`.
    **known: fields of a `ViTConfig` that override values from the files.

  Raises:
    UserError: there is no such file, it has no vision transformer of these
      libraries, or the number of heads is unknown.
  """
  file = _read(path)
  sizes = file.sizes()
  stages = sizes.pop('stages', 0)
  missing = {'width', 'image_size', 'mlp_dim'} - sizes.keys()
  if missing:
    raise UserError(
      f'{file.path} lacks the arrays that tell {" and ".join(sorted(missing))}:'
      ' it may be cut short, so fetch it again.'
    )
  metadata = beside.read(file.path)
  width = sizes['width']
  inputs = 'query' if file.naming == 'huggingface' else 'qkv'
  naming = 'lvvit' if file.has_stem else file.naming
  fields = {
    **sizes,
    'mlp_dim': None if sizes['mlp_dim'] == 4 * width else sizes['mlp_dim'],
    'qkv_bias': file.array(f'block_{{}}/attention/{inputs}', 'bias')
    is not None,
    'norm_epsilon': metadata.norm_epsilon or _EPSILON.get(naming, 1e-6),
  }
  if sizes['distilled'] and file.naming == 'huggingface':
    second_head = file.array('head_distilled', 'bias')
    fields['distillation_head'] = second_head is not None
  if metadata.num_heads is not None:
    fields['num_heads'] = metadata.num_heads
  elif 'num_heads' not in known:
    if width not in _USUAL_HEADS:
      raise UserError(
        f'{file.path} does not tell the number of attention heads, and {width}'
        ' is no usual width: say it by num_heads=….'
      )
    fields['num_heads'] = _USUAL_HEADS[width]
    logging.warning(
      'Assumed num_heads=%d, as is usual with width=%d, since nothing in or'
      ' beside %s tells.',
      *(fields['num_heads'], width, file.path),
    )
  if (stem := file.array('stem/conv_0', 'weight', 4)) is not None:
    fields |= {
      'stem': ConvStemConfig(width=len(stem)),
      'residual_scale': 0.5,
      'token_head': True,
    }
  dense = ViTConfig(**fields | known)
  if not stages:
    return dense
  # The file shows only the number of stages. Assume the paper's positions.
  positions = equal_stages(dense.num_layers, stages)
  return DynamicViTConfig(backbone=dense, stages=positions)


def load(
  path: str | os.PathLike,
  config: Config,
  *,
  key: jax.Array | None = None,
) -> dict[str, Any]:
  """Returns parameters of a model from weights of another library.

  Position embeddings are interpolated if the image size differs. A head that is
  missing in the file, or has another number of classes there, is newly
  initialised, with a warning. Routers are newly initialised too, and so are
  prediction heads, unless the file is of DynamicViT.

  Args:
    path: a `.safetensors`, `.npz` or `.pth` file in any `Naming`, which is
      detected; or a directory with `model.safetensors` or `pytorch_model.bin`.
    config: config of the model.
    key: random key for new parameters. With None, heads are zero, and other
      parameters use `jax.random.key(0)`.

  Returns:
    Nested dictionary of float32 arrays, structured like the 'params' of
    `config.build().init`.

  Raises:
    UserError: there is no such file; it has no vision transformer of these
      libraries; it has another architecture, and the message lists its sizes
      and all arrays that are missing, unexpected or of another shape; or the
      model has batch statistics, which `load_variables` returns.
  """
  if config.dense_twin().stem is not None:
    raise UserError(
      'a model with a convolutional stem has statistics of its batches beside'
      ' its parameters: use load_variables, which returns both.'
    )
  return load_variables(path, config, key=key)['params']


def load_variables(
  path: str | os.PathLike,
  config: Config,
  *,
  key: jax.Array | None = None,
) -> dict[str, dict[str, Any]]:
  """Like `load`, but returns all of a model's variables, by collection."""
  _check_dense(config)
  source = read(path, config)
  if key is None:
    for name, shape in arrays_lib.shapes_of(config).items():
      if name.startswith('head') and name not in source:
        source[name] = np.zeros(shape, np.float32)
  return arrays_lib.complete(source, config, key)


def read(
  path: str | os.PathLike, config: Config, *, truncate: bool = False
) -> dict[str, Lazy]:
  """Returns the variables of a model that a file contains, by name.

  Parameters that `load` would newly initialise are left out, with its warnings.
  Names of batch statistics begin with `batch_stats/`. `truncate` accepts
  weights of a deeper model and uses its first blocks (see
  `ViTConfig.isoflop_twin`). The other arguments are those of `load`, and so are
  the errors, except the last.
  """
  file, dense = _read(path), config.dense_twin()
  entries, arrays = names(config, file.naming), file.arrays
  library, sizes = file.library, file.sizes()
  _check_beside(file.path, dense)

  if (position := file.array('position', rank=3)) is not None:
    name = library.table['position']
    arrays[name] = np.stack([resampled(x, dense) for x in position])
  expected = {entry.theirs: entry.their_shape for entry in entries}
  heads = _new_heads(file, expected)
  ignored = list(library.unused)
  if not any(entry.ours[0].startswith('prediction_') for entry in entries):
    ignored.append(r'score_predictor\..*')
  if truncate:
    block = library.table['block_{}/mlp/up'].partition('{}')[0]
    deeper = range(dense.num_layers, sizes['num_layers'])
    ignored += [re.escape(f'{block}{i}.') + '.*' for i in deeper]
  replaced = {
    entry.theirs for entry in entries if entry.ours[0].split('/')[0] in heads
  }
  ours = arrays_lib.read(
    *(entries, arrays, replaced),
    dropped=ignored,
    describe=f'{file.path}, a vision transformer of {library.label} with '
    + ', '.join(f'{field}={value}' for field, value in sizes.items())
    + ',',
  )
  for name, classes in heads.items():
    # Warn: the model cannot classify until the head is trained.
    logging.warning(
      '%s: %s is made new, for num_classes=%d; %s in these weights.',
      *(file.path, name, dense.num_classes, f'{classes or "there is none"}'),
    )
  return ours


def save(
  path: str | os.PathLike,
  params,
  config: Config,
  *,
  naming: Naming = 'timm',
  batch_stats=None,
) -> None:
  """Writes the weights of a model's dense twin in another library's naming.

  Routers are left out. Prediction heads are written only with naming
  'dynamicvit'. The library's own model of the same sizes can load the file;
  Hugging Face also needs a `config.json` in the same directory.

  Args:
    path: path of the file, ending in `.safetensors`, `.npz` or `.pth`; an
      existing file is replaced atomically.
    params: nested dictionary of arrays, as `load` returns it.
    config: config of the model.
    naming: library whose names are used.
    batch_stats: the collection `batch_stats`, for a model with a convolutional
      stem.

  Raises:
    UserError: the library has no such model, the parameters are not those of
      the config, or the file cannot be written.
  """
  _check_dense(config)
  entries = names(config, naming)
  files.check_suffix(pathlib.Path(path))
  flat = arrays_lib.flatten({'params': params, 'batch_stats': batch_stats})
  written = arrays_lib.arrays(entries, flat, {}, dropped=ROUTING)
  arrays = {name: make() for name, _, make in written}
  if naming == 'huggingface':
    dense = config.dense_twin()
    arrays = {_prefixed(name, dense): x for name, x in arrays.items()}
  # PyTorch's batch norms require these counters, but use them only in training.
  arrays |= {
    name.replace('running_var', 'num_batches_tracked'): np.int64(0)
    for name in arrays
    if name.endswith('running_var')
  }
  # DynamicViT's code reads the weights from the key 'model'.
  files.write(
    path, arrays, torch_key='model' if naming == 'dynamicvit' else None
  )


def _check_dense(config: Config) -> None:
  for name in ('adaptive', 'experts'):
    if getattr(config, name) is not None:
      raise UserError(
        f'config.{name}: other libraries have neither learners nor experts in'
        ' the place of dense modules; convert config.dense_twin(), of which'
        ' models.acm.acmize makes an adaptive model.'
      )


def _check_beside(path: pathlib.Path, dense: ViTConfig) -> None:
  """Compares a config with the JSON files beside the weights, if any.

  Raises UserError if the number of heads or the activation differs; logs a
  warning if the epsilon differs, or the files do not tell the heads.
  """
  saved = beside.read(path)
  if saved.num_heads not in (None, dense.num_heads):
    raise UserError(
      f'num_heads={dense.num_heads}: the model in {path} has {saved.num_heads},'
      f' as the config.json beside it says; set num_heads={saved.num_heads}.'
    )
  if saved.num_heads is None:
    assumed = {'num_heads': dense.num_heads}
    if dense.stem is not None:
      assumed['residual_scale'] = dense.residual_scale
    logging.warning(
      'Assumed as in the config, since nothing in or beside %s tells: %s.',
      *(path, ', '.join(f'{name}={value}' for name, value in assumed.items())),
    )
  if saved.activation not in (None, 'gelu'):
    raise UserError(
      f'{path} was trained with hidden_act={saved.activation!r}, as the'
      " config.json beside it says; only 'gelu' is supported, so use other"
      ' weights.'
    )
  if saved.norm_epsilon not in (None, dense.norm_epsilon):
    logging.warning(
      '%s was trained with norm_epsilon=%g, and the config has %g.',
      *(path, saved.norm_epsilon, dense.norm_epsilon),
    )


def resampled(position_LD, dense: ViTConfig) -> jax.Array | np.ndarray:
  """Returns the position embeddings, interpolated to the model's resolution.

  Embeddings of another width, or of patches that form no square, are returned
  unchanged: they belong to another kind of model.
  """
  length, width = position_LD.shape
  patches = max(length - dense.num_prefix, 0)
  if width != dense.width or math.isqrt(patches) ** 2 != patches or not patches:
    return position_LD
  side = math.isqrt(patches)
  if side != dense.grid:
    logging.warning(
      'The positions of %d x %d patches are interpolated to %d x %d, for'
      ' image_size=%d.',
      *(side, side, dense.grid, dense.grid, dense.image_size),
    )
  return vit.resize_positions(
    jnp.asarray(position_LD), dense.num_prefix, dense.grid
  )


def _new_heads(file: _File, expected: Mapping) -> dict[str, int | None]:
  """Returns the heads that need a new initialisation, by name.

  The values are the number of classes in the weights, or None if the head is
  missing. `expected` has the shapes of arrays by name. Raises UserError if only
  the second head of a distilled model is missing: the logits would be the mean
  of a trained and an untrained head.
  """
  new = {}
  for head in ('head', 'head_distilled', 'head_tokens'):
    names = [file.library.table.get(head, '') + x for x in ('weight', 'bias')]
    if names[0] not in expected:
      continue
    shapes = [file.arrays[n].shape for n in names if n in file.arrays]
    if shapes:
      count, width = shapes[0][:1], expected[names[0]][1]
      if shapes == [(*count, width), count] and count != expected[names[1]]:
        new[head] = count[0]
    elif head != 'head_distilled':
      new[head] = None
    # If the distillation token is missing too, `read` reports it.
    elif file.array('distillation_token') is not None:
      if new.get('head', 0) is not None:
        raise UserError(
          f'{file.path} has a distillation token and no head of it, as Hugging'
          " Face's DeiTForImageClassification: set distillation_head=False."
        )
      new[head] = None
  return new

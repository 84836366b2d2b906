"""Vision transformers in the naming of other libraries.

Supports timm (also used by DeiT's releases), Hugging Face, torchvision, and the
original code of LV-ViT and DynamicViT. `names` returns a table that maps their
arrays to ours, with the layout of each; `load` and `save` use it to convert in
either direction.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import os
import pathlib
import re
from typing import Any, Literal

from absl import logging
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.convert import beside, files
from mod_jax.convert.entry import Entry
from mod_jax.errors import UserError
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models import vit
from mod_jax.models.dynamic_vit import DynamicViTConfig, equal_stages
from mod_jax.models.vit import ViTConfig

Config = ViTConfig | DynamicViTConfig
Naming = Literal['timm', 'huggingface', 'torchvision', 'lvvit', 'dynamicvit']

# Prefix of names that are batch statistics and not parameters.
_STATISTICS = 'batch_stats/'
# Parameters that our models have in addition to those of their dense twins.
ROUTING = (
  r'(block_\d+/)?(router|predictor)/.*',
  r'(prediction|pattern)_\d+(/.*)?',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Library:
  """Names of one library: prefixes, to which `weight` or `bias` is appended."""

  label: str
  trunk: str = ''  # Prefix of all names except those of the heads.
  class_token: str
  distillation_token: str | None  # None without such models.
  position: str
  patch: str
  block: str
  attention_norm: str
  query_key_value: tuple[str, ...]  # One name for all, or three names.
  out: str
  mlp_norm: str
  up: str
  down: str
  norm: str
  head: str
  head_distilled: str | None  # None if the distillation token has no head.
  head_tokens: str | None = None
  # The stem's convolutions and norms are numbered from 1.
  stem: tuple[str, str] | None = None
  prediction: str | None = None  # DynamicViT's heads, numbered from 0.
  qkv_bias: bool | None = None  # Of all models; None if they differ.
  unused: tuple[str, ...] = ()  # Patterns of other arrays, to ignore.


_TIMM = _Library(
  label='timm',
  class_token='cls_token',
  distillation_token='dist_token',
  position='pos_embed',
  patch='patch_embed.proj.',
  block='blocks.{}.',
  attention_norm='norm1.',
  query_key_value=('attn.qkv.',),
  out='attn.proj.',
  mlp_norm='norm2.',
  up='mlp.fc1.',
  down='mlp.fc2.',
  norm='norm.',
  head='head.',
  head_distilled='head_dist.',
)
_HUGGING_FACE = _Library(
  label='Hugging Face',
  trunk='vit.',
  class_token='embeddings.cls_token',
  distillation_token='embeddings.distillation_token',
  position='embeddings.position_embeddings',
  patch='embeddings.patch_embeddings.projection.',
  block='encoder.layer.{}.',
  attention_norm='layernorm_before.',
  query_key_value=(
    'attention.attention.query.',
    'attention.attention.key.',
    'attention.attention.value.',
  ),
  out='attention.output.dense.',
  mlp_norm='layernorm_after.',
  up='intermediate.dense.',
  down='output.dense.',
  norm='layernorm.',
  head='classifier.',
  head_distilled='distillation_classifier.',
  # The heads of other tasks than classification.
  unused=(r'\w+\.pooler\..*', r'\w+\.embeddings\.mask_token'),
)
# DeiTForImageClassificationWithTeacher, and DeiTForImageClassification.
_HUGGING_FACE_DISTILLED = dataclasses.replace(
  _HUGGING_FACE, trunk='deit.', head='cls_classifier.'
)
_HUGGING_FACE_ONE_HEAD = dataclasses.replace(
  _HUGGING_FACE, trunk='deit.', head_distilled=None
)
_TORCHVISION = _Library(
  label='torchvision',
  class_token='class_token',
  distillation_token=None,
  position='encoder.pos_embedding',
  patch='conv_proj.',
  block='encoder.layers.encoder_layer_{}.',
  attention_norm='ln_1.',
  query_key_value=('self_attention.in_proj_',),
  out='self_attention.out_proj.',
  mlp_norm='ln_2.',
  up='mlp.0.',
  down='mlp.3.',
  norm='encoder.ln.',
  head='heads.head.',
  head_distilled=None,
  qkv_bias=True,
)
# The code of Jiang et al. 2021, in timm's naming except for the stem and the
# head of the patch tokens.
_LV_VIT = dataclasses.replace(
  _TIMM,
  label='LV-ViT',
  distillation_token=None,
  head_distilled=None,
  head_tokens='aux_head.',
  stem=('patch_embed.conv{}.', 'patch_embed.bn{}.'),
  # PyTorch's counter of batches, which we do not need.
  unused=(r'patch_embed\.bn\d+\.num_batches_tracked',),
)
# The code of Rao et al. 2021 with a ViT backbone. With an LV-ViT backbone, the
# names are those of `_LV_VIT` and of the prediction heads.
_DYNAMIC_VIT = dataclasses.replace(
  _TIMM,
  label='DynamicViT',
  distillation_token=None,
  head_distilled=None,
  prediction='score_predictor.{}.',
)
_LIBRARIES = {
  'timm': _TIMM,
  'huggingface': _HUGGING_FACE,
  'torchvision': _TORCHVISION,
  'lvvit': _LV_VIT,
  'dynamicvit': _DYNAMIC_VIT,
}
# Modules of DynamicViT's prediction heads and of ours.
_PREDICTION = {
  'in_conv.1.': 'linear_0',
  'out_conv.0.': 'linear_1',
  'out_conv.2.': 'linear_2',
  'out_conv.4.': 'linear_3',
}
# Patterns of Hugging Face's names in transformers 5, and its names on disk.
_IN_MEMORY = (
  (r'^layers\.', 'encoder.layer.'),
  (r'\.attention\.q_proj\.', '.attention.attention.query.'),
  (r'\.attention\.k_proj\.', '.attention.attention.key.'),
  (r'\.attention\.v_proj\.', '.attention.attention.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
  (r'\.mlp\.fc1\.', '.intermediate.dense.'),
  (r'\.mlp\.fc2\.', '.output.dense.'),
)


def names(config: Config, naming: Naming) -> tuple[Entry, ...]:
  """Returns the table that maps a library's arrays to ours.

  It has all arrays of the dense model and, with naming 'dynamicvit', the
  prediction heads of a `DynamicViTConfig`. Those of our names that begin with
  `batch_stats/` belong to that collection; the others are parameters.

  Args:
    config: of our model; routing is ignored.
    naming: the library.

  Raises:
    UserError: the naming is unknown, or the library has no such model.
  """
  dense = config.dense_twin()
  library = _library(dense, naming)
  trunk = library.trunk
  entries = []

  def add(theirs, layout, *ours, **kwargs):
    entries.append(Entry(theirs, ours, layout, **kwargs))

  def norm(theirs, ours):
    add(f'{theirs}weight', 'vector', f'{ours}/scale')
    add(f'{theirs}bias', 'vector', f'{ours}/bias')

  def linear(theirs, layout, *ours, bias=True, **kwargs):
    add(
      f'{theirs}weight', layout, *(f'{name}/kernel' for name in ours), **kwargs
    )
    if bias:
      add(f'{theirs}bias', 'vector', *(f'{name}/bias' for name in ours))

  add(trunk + library.class_token, 'token', 'class_token')
  if dense.distilled:
    theirs = trunk + library.distillation_token
    add(theirs, 'token', 'distillation_token')
  add(trunk + library.position, 'position', 'position')
  channels = 3
  if dense.stem is not None:
    channels = dense.stem.width
    for i in range(dense.stem.depth):
      convolution, batch_norm = (name.format(i + 1) for name in library.stem)
      linear(convolution, 'convolution', f'stem/conv_{i}', bias=False)
      norm(batch_norm, f'stem/norm_{i}')
      for theirs, ours in (('running_mean', 'mean'), ('running_var', 'var')):
        add(batch_norm + theirs, 'vector', f'batch_stats/stem/norm_{i}/{ours}')
  linear(trunk + library.patch, 'patch', 'patch', channels=channels)
  for i in range(dense.num_layers):
    theirs, ours = trunk + library.block.format(i), f'block_{i}'
    norm(theirs + library.attention_norm, f'{ours}/attention_norm')
    inputs = [f'{ours}/attention/{name}' for name in ('query', 'key', 'value')]
    if len(library.query_key_value) == 1:
      inputs = [inputs]
    else:
      inputs = [[name] for name in inputs]
    for name, parts in zip(library.query_key_value, inputs, strict=True):
      linear(theirs + name, 'inward', *parts, bias=dense.qkv_bias)
    linear(theirs + library.out, 'outward', f'{ours}/attention/out')
    norm(theirs + library.mlp_norm, f'{ours}/mlp_norm')
    linear(theirs + library.up, 'inward', f'{ours}/mlp/up')
    linear(theirs + library.down, 'inward', f'{ours}/mlp/down')
  norm(trunk + library.norm, 'norm')
  linear(library.head, 'inward', 'head')
  if dense.has_distillation_head:
    linear(library.head_distilled, 'inward', 'head_distilled')
  if dense.token_head:
    linear(library.head_tokens, 'inward', 'head_tokens')
  for i in range(_num_predictions(config, library)):
    theirs, ours = library.prediction.format(i), f'prediction_{i}'
    norm(f'{theirs}in_conv.0.', f'{ours}/norm')
    for name, our_name in _PREDICTION.items():
      linear(theirs + name, 'inward', f'{ours}/{our_name}')
  return tuple(entries)


def _num_predictions(config: Config, library: _Library) -> int:
  """Returns how many of our prediction heads the library's files contain."""
  if library.prediction is None or not isinstance(config, DynamicViTConfig):
    return 0
  return len(config.stages) if config.score == 'predicted' else 0


def _library(dense: ViTConfig, naming: Naming) -> _Library:
  library = config_lib.choose(naming, _LIBRARIES, 'naming')
  if naming == 'dynamicvit' and dense.stem is not None:
    library = dataclasses.replace(
      _LV_VIT, label=library.label, prediction=library.prediction
    )
  if library.stem is None:
    for field, required in (
      ('stem', None),
      ('residual_scale', 1.0),
      ('token_head', False),
    ):
      if (value := getattr(dense, field)) != required:
        raise UserError(
          f'{field}={value}: {library.label} has no such vision transformer, so'
          f' its weights fit models with {field}={required} only; of LV-ViT,'
          " naming 'lvvit' has them."
        )
  elif dense.stem is None or dense.stem.depth != 3:
    raise UserError(
      f'stem={dense.stem}: the stem of an LV-ViT has three convolutions; for a'
      " model without a stem, use naming 'timm'."
    )
  if dense.distilled and library.distillation_token is None:
    raise UserError(
      f'distilled=True: {library.label} has no distilled vision transformer;'
      " use naming 'timm' or 'huggingface'."
    )
  if library.qkv_bias not in (None, dense.qkv_bias):
    raise UserError(
      f'qkv_bias={dense.qkv_bias}: vision transformers of {library.label} have'
      f' qkv_bias={library.qkv_bias}; use another naming.'
    )
  if library is _HUGGING_FACE and dense.distilled:
    if dense.distillation_head:
      return _HUGGING_FACE_DISTILLED
    return _HUGGING_FACE_ONE_HEAD
  if dense.distilled and not dense.distillation_head:
    raise UserError(
      f'distillation_head=False: distilled models of {library.label} have two'
      " heads; use naming 'huggingface'."
    )
  return library


# Numbers of heads by width, in all published ViTs and DeiTs.
_USUAL_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}
# Epsilons of the layer norms where no file has one; 1e-6 for other namings.
_EPSILON = {'huggingface': 1e-12, 'lvvit': 1e-5}


def derive(path: str | os.PathLike, **known) -> Config:
  """Returns the config of the model in a file of weights.

  Sizes are taken from the arrays' shapes, and other fields from the JSON files
  beside the weights. Without these files, the number of heads is the usual one
  for the width, with a warning.

  Args:
    path: of a file of weights or a model's directory, as for `load`.
    **known: fields of a `ViTConfig` that override those of the files.

  Raises:
    UserError: there is no such file, it has no vision transformer of these
      libraries, or the number of heads is unknown.
  """
  path = files.find(path)
  arrays = files.read(path)
  naming = _recognise(path, arrays)
  library = _LIBRARIES[naming]
  lv_vit = any(name.startswith(_LV_VIT.stem[0].format(1)) for name in arrays)
  if naming == 'dynamicvit' and lv_vit:
    library = dataclasses.replace(_LV_VIT, prediction=library.prediction)
  arrays = _by_table(arrays, naming, library)
  one_head = False
  if naming == 'huggingface' and 'vit.embeddings.distillation_token' in arrays:
    one_head = f'{library.head_distilled}bias' not in arrays
  sizes = _sizes(arrays, library)
  stages = sizes.pop('stages', 0)
  missing = {'width', 'image_size', 'mlp_dim'} - sizes.keys()
  if missing:
    raise UserError(
      f'{path} lacks the arrays that tell {" and ".join(sorted(missing))}: it'
      ' may be cut short, so fetch it again.'
    )
  metadata = beside.read(path)
  width = sizes['width']
  first = library.trunk + library.block.format(0)
  fields = {
    **sizes,
    'mlp_dim': None if sizes['mlp_dim'] == 4 * width else sizes['mlp_dim'],
    'qkv_bias': f'{first}{library.query_key_value[0]}bias' in arrays,
    'distillation_head': not one_head,
    'norm_epsilon': metadata.norm_epsilon
    or _EPSILON.get('lvvit' if lv_vit else naming, 1e-6),
  }
  if metadata.num_heads is not None:
    fields['num_heads'] = metadata.num_heads
  elif 'num_heads' not in known:
    if width not in _USUAL_HEADS:
      raise UserError(
        f'{path} does not tell the number of attention heads, and {width} is no'
        ' usual width: say it by num_heads=….'
      )
    fields['num_heads'] = _USUAL_HEADS[width]
    logging.warning(
      'Assumed num_heads=%d, as is usual with width=%d, since nothing in or'
      ' beside %s tells.',
      *(fields['num_heads'], width, path),
    )
  if lv_vit:
    convolution = library.stem[0].format(1) + 'weight'
    fields |= {
      'stem': ConvStemConfig(width=len(arrays[convolution])),
      'residual_scale': 0.5,
      'token_head': True,
    }
  dense = ViTConfig(**fields | known)
  if not stages:
    return dense
  # The file has the number of stages, but not their positions.
  positions = equal_stages(dense.num_layers, stages)
  return DynamicViTConfig(backbone=dense, stages=positions)


def load(
  path: str | os.PathLike,
  config: Config,
  *,
  key: jax.Array | None = None,
  truncate: bool = False,
) -> dict[str, Any]:
  """Returns parameters of a model from weights of another library.

  Position embeddings are resampled if the image size differs. A head that is
  missing or for another number of classes is newly initialised, with a warning.
  So are routing parameters, which the dense twin does not have, except for
  prediction heads in files of DynamicViT.

  Args:
    path: of a `.safetensors`, `.npz` or `.pth` file in any `Naming`, which is
      detected; or of a directory with `model.safetensors` or
      `pytorch_model.bin`.
    config: of the model.
    key: to initialise new parameters. With None, heads are zero, and other
      parameters use `jax.random.key(0)`.
    truncate: whether to accept weights of a deeper model, and take its first
      blocks (`config.isoflop_twin()`).

  Returns:
    Nested dictionary of float32 arrays, structured like the 'params' of
    `config.build().init`.

  Raises:
    UserError: there is no such file; it has no vision transformer of these
      libraries; or its architecture is another one, in which case the message
      has its sizes and all arrays that are missing, unexpected or of another
      shape. Also if the model has variables other than parameters, which need
      `load_variables`.
  """
  if config.dense_twin().stem is not None:
    raise UserError(
      'a model with a convolutional stem has statistics of its batches beside'
      ' its parameters: use load_variables, which returns both.'
    )
  return load_variables(path, config, key=key, truncate=truncate)['params']


def load_variables(
  path: str | os.PathLike,
  config: Config,
  *,
  key: jax.Array | None = None,
  truncate: bool = False,
) -> dict[str, dict[str, Any]]:
  """Returns all of a model's variables by collection; otherwise like `load`."""
  _check_dense(config)
  source = read(path, config, truncate=truncate)
  shapes = _shapes(config)
  new = set(shapes) - set(source)
  zeros = set()
  if key is None:
    key = jax.random.key(0)
    zeros = {name for name in new if name.startswith('head')}
  fresh = {name: jnp.zeros(shapes[name]) for name in zeros}
  if drawn := tuple(sorted(new - zeros)):
    fresh |= _fresh(config, drawn, key)
  flat = {name: jnp.asarray(array) for name, array in (source | fresh).items()}
  statistics = {n: x for n, x in flat.items() if n.startswith(_STATISTICS)}
  params = {n: x for n, x in flat.items() if n not in statistics}
  return {'params': trees.unflatten(params), **trees.unflatten(statistics)}


def read(
  path: str | os.PathLike, config: Config, *, truncate: bool = False
) -> dict[str, np.ndarray]:
  """Returns those of a model's variables that a file contains, by name.

  Heads that are missing or for another number of classes are left out, with a
  warning, and so are routing parameters. Names of batch statistics begin with
  `batch_stats/`. Arguments and errors are those of `load`, without `key`.
  """
  path = files.find(path)
  arrays = files.read(path)
  naming = _recognise(path, arrays)
  dense = config.dense_twin()
  library = _library(dense, naming)
  entries = names(config, naming)
  arrays = _by_table(arrays, naming, library)
  sizes = _sizes(arrays, library)
  _check_beside(path, dense)

  shapes = _shapes(config)
  by_path = {name: entry for entry in entries for name in entry.ours}
  _resize(arrays, by_path['position'].theirs, dense)
  heads = _new_heads(path, arrays, by_path, shapes, library)
  ignored = library.unused
  if library.prediction and not _num_predictions(config, library):
    ignored += (re.escape(library.prediction).replace(r'\{\}', r'\d+') + '.*',)
  if truncate and sizes.get('num_layers', 0) > dense.num_layers:
    deeper = dataclasses.replace(dense, num_layers=sizes['num_layers'])
    extra = {entry.theirs for entry in names(deeper, naming)}
    extra -= {entry.theirs for entry in entries}
    ignored += tuple(map(re.escape, extra))
  replaced = {
    entry.theirs for entry in entries if entry.ours[0].split('/')[0] in heads
  }
  trees.compare(
    {entry.theirs: entry.shape(shapes) for entry in entries},
    {name: a.shape for name, a in arrays.items() if name not in replaced},
    new=tuple(map(re.escape, replaced)),
    dropped=ignored,
    describe=f'{path}, a vision transformer of {library.label} with '
    + ', '.join(f'{field}={value}' for field, value in sizes.items())
    + ',',
  )

  for name, classes in heads.items():
    # A warning, since the model cannot classify until the head is trained.
    logging.warning(
      '%s: %s is made new, for num_classes=%d; %s in these weights.',
      *(path, name, dense.num_classes, f'{classes or "there is none"}'),
    )
  source = {}
  for entry in entries:
    if entry.theirs not in replaced:
      array = arrays.pop(entry.theirs)
      parts = entry.to_ours(array, shapes[entry.ours[0]])
      source.update(zip(entry.ours, parts, strict=True))
  return source


def save(
  path: str | os.PathLike,
  params,
  config: Config,
  *,
  naming: Naming = 'timm',
  batch_stats=None,
) -> None:
  """Writes the weights of a model's dense twin in another library's naming.

  Routers and prediction heads are left out, except prediction heads with naming
  'dynamicvit'. The library's own model of the same sizes can load the file;
  Hugging Face also needs a `config.json` in the same directory.

  Args:
    path: of the file, ending in `.safetensors`, `.npz` or `.pth`; an existing
      file is replaced atomically.
    params: nested dictionary of arrays, as `load` returns it.
    config: of the model.
    naming: the library.
    batch_stats: the collection of that name, for a model with a convolutional
      stem.

  Raises:
    UserError: the library has no such model, the parameters are not those of
      the config, or the file cannot be written.
  """
  _check_dense(config)
  entries = names(config, naming)
  files.check_suffix(pathlib.Path(path))
  flat = trees.flatten(nn.unbox(params))
  for name, array in trees.flatten(nn.unbox(batch_stats or {})).items():
    flat[_STATISTICS + name] = array
  shapes = _shapes(config)
  trees.compare(
    {name: shapes[name] for entry in entries for name in entry.ours},
    {name: jnp.shape(array) for name, array in flat.items()},
    dropped=ROUTING,
    describe='params',
  )
  arrays = {}
  for entry in entries:
    ours = [np.asarray(flat[name], np.float32) for name in entry.ours]
    arrays[entry.theirs] = entry.to_theirs(*ours)
    if entry.theirs.endswith('running_var'):
      # PyTorch's layers require it, but use it only in training.
      counter = entry.theirs.replace('running_var', 'num_batches_tracked')
      arrays[counter] = np.int64(0)
  # DynamicViT's code reads the weights from the key 'model'.
  files.write(
    path, arrays, torch_key='model' if naming == 'dynamicvit' else None
  )


def _check_dense(config: Config) -> None:
  if config.adaptive is not None:
    raise UserError(
      'config.adaptive: other libraries have no learners in the place of dense'
      ' modules; convert config.dense_twin(), of which models.acm.acmize makes'
      ' an adaptive model.'
    )


def _init(config: Config, key: jax.Array) -> dict[str, jax.Array]:
  variables = nn.unbox(config.build().init(key, config.example()))
  statistics = trees.flatten(variables.get('batch_stats', {}))
  return trees.flatten(variables['params']) | {
    _STATISTICS + name: array for name, array in statistics.items()
  }


@functools.lru_cache(maxsize=4)
def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
  abstract = jax.eval_shape(functools.partial(_init, config), jax.random.key(0))
  return {name: leaf.shape for name, leaf in abstract.items()}


# Compiled, so that XLA removes the computation of all other parameters.
@functools.partial(jax.jit, static_argnames=('config', 'wanted'))
def _fresh(
  config: Config, wanted: tuple[str, ...], key: jax.Array
) -> dict[str, jax.Array]:
  """Returns newly initialised variables with the names `wanted`."""
  flat = _init(config, key)
  return {name: flat[name] for name in wanted}


def _recognise(path: pathlib.Path, arrays: Mapping[str, Any]) -> Naming:
  """Returns the naming of the arrays, mainly by that of the patch embedding."""
  if any(name.startswith('score_predictor.') for name in arrays):
    return 'dynamicvit'
  if any(name.startswith(_LV_VIT.stem[0].format(1)) for name in arrays):
    return 'lvvit'
  for naming, library in _LIBRARIES.items():
    pattern = re.escape(library.patch + 'weight')
    if library.trunk:
      pattern = r'(vit\.|deit\.)?' + pattern
    if any(re.fullmatch(pattern, name) for name in arrays):
      return naming
  first_names = ', '.join(sorted(arrays)[:3]) or 'nothing'
  choices = ' or '.join(
    f'{library.label} ({library.trunk}{library.patch}weight)'
    for library in (_TIMM, _HUGGING_FACE, _TORCHVISION)
  )
  raise UserError(
    f'{path} holds no vision transformer as {choices} name it; its first names'
    f' are {first_names}: convert it to one of these.'
  )


def _by_table(arrays, naming: Naming, library: _Library):
  """Returns arrays by their names in the table of `names`.

  In Hugging Face, names differ between the classes that saved the weights.
  """
  if naming != 'huggingface':
    return dict(arrays)

  def rename(name):
    if match := re.fullmatch(r'(?:cls_)?classifier\.(.*)', name):
      return library.head + match[1]
    if name.startswith(_HUGGING_FACE.head_distilled):
      return name
    name = re.sub(r'^(vit|deit)\.', '', name)
    for old, new in _IN_MEMORY:
      name = re.sub(old, new, name)
    return library.trunk + name

  return {rename(name): array for name, array in arrays.items()}


def _sizes(arrays, library: _Library) -> dict[str, Any]:
  """Returns the fields of a config that the arrays' shapes determine.

  For DynamicViT also `stages`, the number of its prediction heads.
  """

  def shape(name, rank):
    array = arrays.get(name)
    return array.shape if array is not None and array.ndim == rank else None

  sizes = {}
  trunk = library.trunk
  distilled = library.distillation_token is not None and (
    trunk + library.distillation_token in arrays
  )
  if patch := shape(trunk + library.patch + 'weight', 4):
    # The stem halves the resolution before the patch embedding.
    side = patch[2] * (1 if library.stem is None else 2)
    sizes |= {'width': patch[0], 'patch_size': side}
  block = re.escape(trunk + library.block).replace(r'\{\}', r'(\d+)')
  layers = {int(m[1]) for m in map(re.compile(block).match, arrays) if m}
  sizes['num_layers'] = len(layers)
  if up := shape(trunk + library.block.format(0) + library.up + 'weight', 2):
    sizes['mlp_dim'] = up[0]
  if head := shape(library.head + 'bias', 1):
    sizes['num_classes'] = head[0]
  position = shape(trunk + library.position, 3)
  if patch and position:
    patches = max(position[1] - 1 - distilled, 0)
    if math.isqrt(patches) ** 2 == patches:
      sizes['image_size'] = math.isqrt(patches) * side
  sizes['distilled'] = distilled
  if library.prediction is not None:
    first = library.prediction.replace('{}', r'(\d+)')
    heads = {int(m[1]) for m in map(re.compile(first).match, arrays) if m}
    sizes['stages'] = len(heads)
  return sizes


def _check_beside(path: pathlib.Path, dense: ViTConfig) -> None:
  """Compares a config with the JSON files beside the weights, if any."""
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


def _resize(arrays, name: str, dense: ViTConfig) -> None:
  """Resamples position embeddings in place if only the grid differs."""
  position = arrays.get(name)
  if position is None or position.ndim != 3 or len(position) != 1:
    return
  # Not a square if the numbers of prefix tokens differ; an error comes later.
  patches = position.shape[1] - dense.num_prefix
  square = patches > 0 and math.isqrt(patches) ** 2 == patches
  if square and position.shape[2] == dense.width:
    resized = vit.resize_positions(position[0], dense.num_prefix, dense.grid)
    arrays[name] = np.asarray(resized)[None]


def _new_heads(
  path, arrays, by_path, shapes, library: _Library
) -> dict[str, int | None]:
  """Returns heads that need a new initialisation.

  The values are the number of classes in the weights, or None if the head is
  missing. It is an error if only the second head of a distilled model is
  missing, since the logits are the mean of both.
  """
  new = {}
  for head in ('head', 'head_distilled', 'head_tokens'):
    if f'{head}/kernel' not in by_path:
      continue
    kernel = by_path[f'{head}/kernel']
    bias = by_path[f'{head}/bias']
    pair = [arrays.get(entry.theirs) for entry in (kernel, bias)]
    if all(array is None for array in pair):
      if head != 'head_distilled':
        new[head] = None
      # If the token is missing too, `read` reports a different architecture.
      elif library.trunk + library.distillation_token in arrays:
        if 'head' not in new or new['head'] is not None:
          raise UserError(
            f'{path} has a distillation token and no head of it, as Hugging'
            " Face's DeiTForImageClassification: set distillation_head=False."
          )
        new[head] = None
    elif all(array is not None for array in pair):
      classes, width = kernel.shape(shapes)
      (theirs,) = pair[1].shape if pair[1].ndim == 1 else (classes,)
      if theirs != classes and pair[0].shape == (theirs, width):
        new[head] = theirs
  return new

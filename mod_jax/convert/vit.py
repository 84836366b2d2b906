"""Vision transformers in the naming of other libraries.

Those of timm, which the DeiT releases have, Hugging Face and torchvision, and
of the authors' code of LV-ViT and DynamicViT. One table, `names`, says which of
their arrays is which of ours, and how it is laid out; `load` and `save` follow
it in either direction.
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

# Before the names of what is no parameter.
_STATISTICS = 'batch_stats/'
# What our models have beside those of their dense twins.
ROUTING = (
  r'(block_\d+/)?(router|predictor)/.*',
  r'(prediction|pattern)_\d+(/.*)?',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Library:
  """Names of one library: prefixes, to which `weight` or `bias` is appended."""

  label: str
  trunk: str = ''  # Before all names but those of the heads.
  class_token: str
  distillation_token: str | None  # None where there is no such model.
  position: str
  patch: str
  block: str
  attention_norm: str
  query_key_value: tuple[str, ...]  # One, or one each.
  out: str
  mlp_norm: str
  up: str
  down: str
  norm: str
  head: str
  head_distilled: str | None  # None where a second token has no head.
  head_tokens: str | None = None
  # The stem's convolutions and norms are numbered from 1.
  stem: tuple[str, str] | None = None
  prediction: str | None = None  # Of DynamicViT's heads, by number from 0.
  qkv_bias: bool | None = None  # What all models have; None = either.
  unused: tuple[str, ...] = ()  # What its files may hold beside.


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
# The code of Jiang et al. 2021, in the naming of timm but for the stem and the
# head of the tokens.
_LV_VIT = dataclasses.replace(
  _TIMM,
  label='LV-ViT',
  distillation_token=None,
  head_distilled=None,
  head_tokens='aux_head.',
  stem=('patch_embed.conv{}.', 'patch_embed.bn{}.'),
  # How many batches the statistics are of: for training there, and not here.
  unused=(r'patch_embed\.bn\d+\.num_batches_tracked',),
)
# The code of Rao et al. 2021, on a ViT; on an LV-ViT, with all of the above.
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
# The modules of a prediction head there, and here.
_PREDICTION = {
  'in_conv.1.': 'linear_0',
  'out_conv.0.': 'linear_1',
  'out_conv.2.': 'linear_2',
  'out_conv.4.': 'linear_3',
}
# Hugging Face's names in memory since transformers 5, and on disk.
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
  """Returns which of a library's arrays is which of ours.

  All of the dense model's, and with naming 'dynamicvit' the prediction heads of
  a `DynamicViTConfig`. Names of ours that begin with `batch_stats/` are of that
  collection, and the others are parameters.

  Args:
    config: of our model; routing adds nothing.
    naming: the library.

  Raises:
    UserError: the library has no such naming or no such model.
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
      convolution, normed = (name.format(i + 1) for name in library.stem)
      linear(convolution, 'convolution', f'stem/conv_{i}', bias=False)
      norm(normed, f'stem/norm_{i}')
      for theirs, ours in (('running_mean', 'mean'), ('running_var', 'var')):
        add(normed + theirs, 'vector', f'batch_stats/stem/norm_{i}/{ours}')
  linear(trunk + library.patch, 'patch', 'patch', channels=channels)
  for i in range(dense.num_layers):
    theirs, ours = trunk + library.block.format(i), f'block_{i}'
    norm(theirs + library.attention_norm, f'{ours}/attention_norm')
    inputs = [f'{ours}/attention/{name}' for name in ('query', 'key', 'value')]
    if len(library.query_key_value) == 1:
      inputs = [inputs]
    else:
      inputs = [[name] for name in inputs]
    for name, those in zip(library.query_key_value, inputs, strict=True):
      linear(theirs + name, 'inward', *those, bias=dense.qkv_bias)
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
    for name, mine in _PREDICTION.items():
      linear(theirs + name, 'inward', f'{ours}/{mine}')
  return tuple(entries)


def _num_predictions(config: Config, library: _Library) -> int:
  """Returns how many prediction heads the library's files have of ours."""
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
    for field, usual in (
      ('stem', None),
      ('residual_scale', 1.0),
      ('token_head', False),
    ):
      if (value := getattr(dense, field)) != usual:
        raise UserError(
          f'{field}={value}: {library.label} has no such vision transformer, so'
          f' its weights fit models with {field}={usual} only; of LV-ViT,'
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


# Heads of the usual widths, in all ViTs and DeiTs that were published.
_USUAL_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}
# What the libraries' models have that are not told in a file.
_EPSILON = {'huggingface': 1e-12, 'lvvit': 1e-5}


def derive(path: str | os.PathLike, **known) -> Config:
  """Returns the config of the model that a file of weights is of.

  Sizes are those of the arrays. What these do not tell is read in the JSON
  files beside them, or else is as usual at this width, which the log says.

  Args:
    path: as of `load`.
    **known: fields of a `ViTConfig` that are what the caller says.

  Raises:
    UserError: there is no such file, or it holds no vision transformer of
      these libraries; or nothing tells the number of heads.
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
  lacking = {'width', 'image_size', 'mlp_dim'} - sizes.keys()
  if lacking:
    raise UserError(
      f'{path} lacks the arrays that tell {" and ".join(sorted(lacking))}: it'
      ' may be cut short, so fetch it again.'
    )
  told = beside.read(path)
  width = sizes['width']
  first = library.trunk + library.block.format(0)
  fields = {
    **sizes,
    'mlp_dim': None if sizes['mlp_dim'] == 4 * width else sizes['mlp_dim'],
    'qkv_bias': f'{first}{library.query_key_value[0]}bias' in arrays,
    'distillation_head': not one_head,
    'norm_epsilon': told.norm_epsilon
    or _EPSILON.get('lvvit' if lv_vit else naming, 1e-6),
  }
  if told.num_heads is not None:
    fields['num_heads'] = told.num_heads
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
  # The file tells how many there are, not where.
  places = equal_stages(dense.num_layers, stages)
  return DynamicViTConfig(backbone=dense, stages=places)


def load(
  path: str | os.PathLike,
  config: Config,
  *,
  key: jax.Array | None = None,
  truncate: bool = False,
) -> dict[str, Any]:
  """Returns parameters of a model from weights of timm and others.

  Position embeddings are resampled where the image size differs. A head for
  another number of classes, or that is not there, is made new, and the log says
  so. What routing needs beside the weights of the dense twin is new too, but
  for the prediction heads that files of DynamicViT have.

  Args:
    path: of a `.safetensors`, `.npz` or `.pth` file in a naming of `Naming`,
      which is found out; or of a directory with `model.safetensors` or
      `pytorch_model.bin`.
    config: of the model.
    key: for what is made new. None is for `jax.random.key(0)`, and zeros in
      place of a new head.
    truncate: whether weights of a deeper model will do, of which the first
      blocks are taken (`config.isoflop_twin()`).

  Returns:
    Nested dictionary of float32 arrays, as `config.build().init` makes it.

  Raises:
    UserError: there is no such file; it holds no vision transformer of these
      libraries; or one of another architecture: tells its sizes, and every
      array that is missing, unexpected or of another shape. Or the model has
      more than parameters: `load_variables` returns them all.
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
  """Returns all of a model's variables by collection; otherwise as `load`."""
  _check_dense(config)
  source = read(path, config, truncate=truncate)
  shapes = _shapes(config)
  made = set(shapes) - set(source)
  zeros = set()
  if key is None:
    key = jax.random.key(0)
    zeros = {name for name in made if name.startswith('head')}
  fresh = {name: jnp.zeros(shapes[name]) for name in zeros}
  if drawn := tuple(sorted(made - zeros)):
    fresh |= _fresh(config, drawn, key)
  flat = {name: jnp.asarray(array) for name, array in (source | fresh).items()}
  statistics = {n: x for n, x in flat.items() if n.startswith(_STATISTICS)}
  params = {n: x for n, x in flat.items() if n not in statistics}
  return {'params': trees.unflatten(params), **trees.unflatten(statistics)}


def read(
  path: str | os.PathLike, config: Config, *, truncate: bool = False
) -> dict[str, np.ndarray]:
  """Returns what of a model's variables a file holds, by name, as `load` finds.

  Heads that are not there, or are for other classes, are left out, and the log
  says so; and so is what routing needs beside the dense twin's weights. Names
  of statistics begin with `batch_stats/`.
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
  dropped = library.unused
  if library.prediction and not _num_predictions(config, library):
    dropped += (re.escape(library.prediction).replace(r'\{\}', r'\d+') + '.*',)
  if truncate and sizes.get('num_layers', 0) > dense.num_layers:
    deeper = dataclasses.replace(dense, num_layers=sizes['num_layers'])
    beyond = {entry.theirs for entry in names(deeper, naming)}
    beyond -= {entry.theirs for entry in entries}
    dropped += tuple(map(re.escape, beyond))
  replaced = {
    entry.theirs for entry in entries if entry.ours[0].split('/')[0] in heads
  }
  trees.compare(
    {entry.theirs: entry.shape(shapes) for entry in entries},
    {name: a.shape for name, a in arrays.items() if name not in replaced},
    new=tuple(map(re.escape, replaced)),
    dropped=dropped,
    describe=f'{path}, a vision transformer of {library.label} with '
    + ', '.join(f'{field}={value}' for field, value in sizes.items())
    + ',',
  )

  for name, classes in heads.items():
    # Told loudly: until it is trained, such a model knows no classes.
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
  """Writes the weights of a model's dense twin as another library names them.

  Routers and prediction heads are left out, but for those that naming
  'dynamicvit' has. The library's own model of the same sizes loads the file;
  Hugging Face wants its `config.json` beside.

  Args:
    path: of the file, ending in `.safetensors`, `.npz` or `.pth`; what stood
      there is replaced, once all is written.
    params: nested dictionary of arrays, as `load` returns it.
    config: of the model.
    naming: the library.
    batch_stats: the collection of that name, where there is a convolutional
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
      # PyTorch's layers look for it, and use it in training alone.
      counted = entry.theirs.replace('running_var', 'num_batches_tracked')
      arrays[counted] = np.int64(0)
  # Where DynamicViT's code looks for it.
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


# Compiled, so that nothing but what is wanted is computed.
@functools.partial(jax.jit, static_argnames=('config', 'wanted'))
def _fresh(
  config: Config, wanted: tuple[str, ...], key: jax.Array
) -> dict[str, jax.Array]:
  """Returns some parameters as they are initialised."""
  flat = _init(config, key)
  return {name: flat[name] for name in wanted}


def _recognise(path: pathlib.Path, arrays: Mapping[str, Any]) -> Naming:
  """Returns whose names these are, by that of the patch embedding."""
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
  shown = ', '.join(sorted(arrays)[:3]) or 'nothing'
  known = ' or '.join(
    f'{library.label} ({library.trunk}{library.patch}weight)'
    for library in (_TIMM, _HUGGING_FACE, _TORCHVISION)
  )
  raise UserError(
    f'{path} holds no vision transformer as {known} name it; its first names'
    f' are {shown}: convert it to one of these.'
  )


def _by_table(arrays, naming: Naming, library: _Library):
  """Returns arrays under the names that the table has for them.

  Those of Hugging Face differ with the class that wrote them.
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
  """Returns what of a config the weights tell, by field."""

  def shape(name, rank):
    found = arrays.get(name)
    return found.shape if found is not None and found.ndim == rank else None

  sizes = {}
  trunk = library.trunk
  distilled = library.distillation_token is not None and (
    trunk + library.distillation_token in arrays
  )
  if patch := shape(trunk + library.patch + 'weight', 4):
    # The stem halves the image first.
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
  """Checks what no array tells, where the files beside the weights do."""
  told = beside.read(path)
  if told.num_heads not in (None, dense.num_heads):
    raise UserError(
      f'num_heads={dense.num_heads}: the model in {path} has {told.num_heads},'
      f' as the config.json beside it says; set num_heads={told.num_heads}.'
    )
  if told.num_heads is None:
    assumed = {'num_heads': dense.num_heads}
    if dense.stem is not None:
      assumed['residual_scale'] = dense.residual_scale
    logging.warning(
      'Assumed as in the config, since nothing in or beside %s tells: %s.',
      *(path, ', '.join(f'{name}={value}' for name, value in assumed.items())),
    )
  if told.activation not in (None, 'gelu'):
    raise UserError(
      f'{path} was trained with hidden_act={told.activation!r}, as the'
      " config.json beside it says; only 'gelu' is supported, so use other"
      ' weights.'
    )
  if told.norm_epsilon not in (None, dense.norm_epsilon):
    logging.warning(
      '%s was trained with norm_epsilon=%g, and the config has %g.',
      *(path, told.norm_epsilon, dense.norm_epsilon),
    )


def _resize(arrays, name: str, dense: ViTConfig) -> None:
  """Resamples position embeddings where the grid alone is another."""
  position = arrays.get(name)
  if position is None or position.ndim != 3 or len(position) != 1:
    return
  # With another number of tokens before the patches, these make no square.
  patches = position.shape[1] - dense.num_prefix
  square = patches > 0 and math.isqrt(patches) ** 2 == patches
  if square and position.shape[2] == dense.width:
    resized = vit.resize_positions(position[0], dense.num_prefix, dense.grid)
    arrays[name] = np.asarray(resized)[None]


def _new_heads(
  path, arrays, by_path, shapes, library: _Library
) -> dict[str, int | None]:
  """Returns heads to make new, with the classes that the weights have.

  Those are heads for other classes, and, with None, heads that are not there.

  Raises:
    UserError: of two heads, there is one: half of the logits would be none.
  """
  new = {}
  for head in ('head', 'head_distilled', 'head_tokens'):
    if f'{head}/kernel' not in by_path:
      continue
    kernel = by_path[f'{head}/kernel']
    bias = by_path[f'{head}/bias']
    found = [arrays.get(entry.theirs) for entry in (kernel, bias)]
    if all(array is None for array in found):
      if head != 'head_distilled':
        new[head] = None
      # Without its token, it is not the head alone that is missing.
      elif library.trunk + library.distillation_token in arrays:
        if 'head' not in new or new['head'] is not None:
          raise UserError(
            f'{path} has a distillation token and no head of it, as Hugging'
            " Face's DeiTForImageClassification: set distillation_head=False."
          )
        new[head] = None
    elif all(array is not None for array in found):
      classes, width = kernel.shape(shapes)
      (others,) = found[1].shape if found[1].ndim == 1 else (classes,)
      if others != classes and found[0].shape == (others, width):
        new[head] = others
  return new

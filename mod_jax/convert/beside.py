"""What stands beside weights: the JSON files of Hugging Face and timm."""

import contextlib
import dataclasses
import math
import numbers
import os
import pathlib
import re

from PIL import Image

from mod_jax import config as config_lib
from mod_jax import paths

# Heads by the size in timm's names of architectures.
_HEADS = {'tiny': 3, 'small': 6, 'base': 12, 'large': 16, 'huge': 16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
  """What no array tells; None where nothing is said.

  Attributes:
    num_heads: of the attention.
    norm_epsilon: of the layer norms.
    activation: of the MLPs, in Hugging Face's word.
    classes: the names of the classes, in the order of the logits.
    mean: of the pixels that training saw, by channel, of values in [0, 1].
    std: their standard deviation.
    crop_fraction: side of the centred square that evaluation looks at, over
      the picture's shorter side.
    resample: how pictures are resized.
  """

  num_heads: int | None = None
  norm_epsilon: float | None = None
  activation: str | None = None
  classes: tuple[str, ...] | None = None
  mean: tuple[float, float, float] | None = None
  std: tuple[float, float, float] | None = None
  crop_fraction: float | None = None
  resample: Image.Resampling | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """What is read of a `config.json`, but for the names of classes."""

  num_attention_heads: config_lib.Size | None = None
  num_heads: config_lib.Size | None = None  # In timm's words.
  architecture: str | None = None
  layer_norm_eps: config_lib.Epsilon | None = None
  hidden_act: str | None = None
  crop_pct: config_lib.Fraction | None = None


def read(path: str | os.PathLike) -> Beside:
  """Returns what the files in the directory of a file of weights say.

  `config.json` of Hugging Face tells the model, and its
  `preprocessor_config.json` what to do with pictures. timm's `config.json`
  names the architecture, there or in its `pretrained_cfg`, which has the rest.
  A file that is missing or no JSON says nothing.

  Raises:
    UserError: a field is not of its type.
  """
  folder = pathlib.Path(path).parent
  fields = paths.read_object(folder / 'config.json')
  for group in ('model_args', 'pretrained_cfg'):
    values = fields.get(group)
    fields = {**(values if isinstance(values, dict) else {}), **fields}
  told = config_lib.from_known(_Fields, fields, f'{folder}/config.json')
  pictures = paths.read_object(folder / 'preprocessor_config.json')
  heads = told.num_attention_heads or told.num_heads
  architecture = re.match(
    r'(?:vit|deit3?)_(?P<size>[a-z]+)_', told.architecture or ''
  )
  if heads is None and architecture:
    heads = _HEADS.get(architecture['size'])
  normalized = pictures.get('do_normalize', True)
  return Beside(
    num_heads=heads,
    norm_epsilon=told.layer_norm_eps,
    activation=told.hidden_act,
    classes=_classes(fields),
    mean=_channels(pictures.get('image_mean', fields.get('mean')))
    if normalized
    else (0.0, 0.0, 0.0),
    std=_channels(pictures.get('image_std', fields.get('std')))
    if normalized
    else (1.0, 1.0, 1.0),
    crop_fraction=_crop(pictures, fields),
    resample=_resample(pictures, fields),
  )


def _classes(fields) -> tuple[str, ...] | None:
  names = fields.get('label_names')
  by_id = fields.get('id2label')
  if isinstance(by_id, dict):
    with contextlib.suppress(ValueError):
      names = [by_id[i] for i in sorted(by_id, key=int)]
  if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
    return None
  # What Hugging Face writes where nobody named them.
  if all(re.fullmatch(r'LABEL_\d+', name) for name in names):
    return None
  return tuple(names)


def _channels(values) -> tuple[float, float, float] | None:
  if (
    isinstance(values, list)
    and len(values) == 3
    and all(isinstance(x, numbers.Real) and math.isfinite(x) for x in values)
  ):
    return tuple(map(float, values))
  return None


def _crop(pictures, fields) -> float | None:
  if not pictures:
    return fields.get('crop_pct')
  if not pictures.get('do_center_crop', False):
    return 1.0  # It resizes all of the picture.
  whole, part = (_side(pictures.get(n)) for n in ('size', 'crop_size'))
  return None if None in (whole, part) else min(1.0, part / whole)


def _resample(pictures, fields) -> Image.Resampling | None:
  with contextlib.suppress(KeyError, ValueError):
    if 'resample' in pictures:
      return Image.Resampling(pictures['resample'])
    return Image.Resampling[str(fields.get('interpolation')).upper()]
  return None


def _side(size) -> float | None:
  if isinstance(size, dict):
    size = size.get('shortest_edge', size.get('height'))
  return size if isinstance(size, numbers.Real) and size > 0 else None

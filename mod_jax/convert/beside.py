"""Reads the JSON files that Hugging Face and timm store with the weights."""

import contextlib
import dataclasses
import math
import numbers
import os
import pathlib
import re
from typing import Any, Literal

from absl import logging
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.errors import require

# Hugging Face's `problem_type` where an image may have several classes.
MULTI_LABEL = 'multi_label_classification'
# Number of attention heads by the size in a name such as vit_base_patch16_224.
_HEADS = {'tiny': 3, 'small': 6, 'base': 12, 'large': 16, 'huge': 16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
  """Metadata from the JSON files beside the weights; fields are None if absent.

  Attributes:
    num_heads: number of attention heads.
    norm_epsilon: epsilon of the layer norms.
    activation: activation function of the MLPs, by Hugging Face's name.
    classes: names of the classes, in the order of the logits.
    multi_label: whether an image may have any number of classes.
    image_size: height and width of the model's input in pixels.
    pictures: other fields of `Preprocess` by name, if the files have them.
    unfollowed: settings of image preprocessing that are not supported, as
      'name=value'.
  """

  num_heads: int | None = None
  norm_epsilon: float | None = None
  activation: str | None = None
  classes: tuple[str, ...] | None = None
  multi_label: bool = False
  image_size: int | None = None
  pictures: dict[str, Any] = dataclasses.field(default_factory=dict)
  unfollowed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """The fields of a `config.json` that are read, except the class names."""

  num_attention_heads: config_lib.Size | None = None
  num_heads: config_lib.Size | None = None  # timm's name.
  architecture: str | None = None
  layer_norm_eps: config_lib.Epsilon | None = None
  hidden_act: str | None = None
  problem_type: str | None = None
  crop_pct: config_lib.Positive | None = None  # Above 1, there is a border.
  crop_mode: str | None = None
  # timm's settings that no array shows; other values raise UserError.
  global_pool: Literal['token', ''] | None = None
  act_layer: Literal['gelu'] | None = None
  image_size: int | tuple[int, ...] | None = None
  img_size: int | tuple[int, ...] | None = None  # timm's name.

  def __post_init__(self):
    for name in ('image_size', 'img_size'):
      size = getattr(self, name)
      square = not isinstance(size, tuple) or len(set(size)) == 1
      require(square, 'the same side twice', **{name: size})


def read(path: str | os.PathLike) -> Beside:
  """Returns the metadata in the directory that contains the file `path`.

  Hugging Face describes the model in `config.json` and image preprocessing in
  `preprocessor_config.json`. timm has only a `config.json`, with its fields at
  the top level, in `pretrained_cfg` and in `model_args`. Files that are missing
  or not JSON are ignored.

  Raises:
    UserError: a field has a value of the wrong type, or an unsupported one.
  """
  folder = pathlib.Path(path).parent
  fields = paths.read_object(folder / 'config.json')
  for group in ('model_args', 'pretrained_cfg'):
    values = fields.get(group)
    fields = {**(values if isinstance(values, dict) else {}), **fields}
  config = config_lib.from_known(_Fields, fields, f'{folder}/config.json')
  size = re.match(r'(?:vit|deit3?)_([a-z]+)_', config.architecture or '')
  processor = of_processor(folder)
  return Beside(
    num_heads=config.num_attention_heads
    or config.num_heads
    or _HEADS.get(size and size[1]),
    norm_epsilon=config.layer_norm_eps,
    activation=config.hidden_act,
    classes=_classes(fields),
    multi_label=config.problem_type == MULTI_LABEL,
    **(
      _processor(processor, fields.get('model_type'))
      if processor
      else _pretrained_cfg(fields)
    ),
  )


def of_processor(folder, kind: str = 'image_processor') -> dict[str, Any]:
  """Returns a folder's settings of preprocessing for `kind`; {} if none."""
  if processor := paths.read_object(folder / 'preprocessor_config.json'):
    return processor
  # Newer versions of transformers write all processors to one file, by kind.
  both = paths.read_object(folder / 'processor_config.json')
  processor = both.get(kind)
  return processor if isinstance(processor, dict) else {}


def of_detector(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the fields of a `DetectionPreprocess`; the defaults are DETR's.

  Logs a warning about settings in the folder that are not supported.
  """
  fields = of_processor(folder)
  size = fields.pop('size', None)
  told = _processor(fields, 'detr')
  unfollowed, pictures = [*told['unfollowed']], told['pictures']
  if pictures['resample'] != Image.Resampling.BILINEAR:
    unfollowed.append(f'resample={pictures["resample"]}')
  found = {'short_side': 800, 'image_size': (1333, 1333)}
  found |= {name: pictures[name] for name in ('mean', 'std')}
  if isinstance(size, int):  # Older versions of transformers wrote a number.
    size = {'shortest_edge': size}
    size['longest_edge'] = fields.get('max_size', 1333)
  match size:
    case {'shortest_edge': int(short), 'longest_edge': int(long)}:
      found |= {'short_side': short, 'image_size': (long, long)}
    case {'max_height': int(height), 'max_width': int(width)}:
      found |= {'short_side': None, 'image_size': (height, width)}
    case None:
      pass
    case _:
      unfollowed.append(f'size={size}')
  if unfollowed:
    logging.warning(
      'Of the preprocessing beside %s, this is not followed: %s.',
      *(folder, '; '.join(unfollowed)),
    )
  return found


def _classes(fields) -> tuple[str, ...] | None:
  # timm's names may be a list or an object, and older files call them `labels`.
  names = fields.get('label_names', fields.get('labels'))
  by_id = fields.get('id2label', names)
  if isinstance(by_id, dict):
    with contextlib.suppress(ValueError):
      names = [by_id[i] for i in sorted(by_id, key=int)]
  if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
    return None
  # Hugging Face gives these names to classes without a name.
  default = all(re.fullmatch(r'LABEL_\d+', name) for name in names)
  return None if default else tuple(names)


# Defaults of Hugging Face's image processors; sizes as returned by `_size`.
_VIT = {
  'do_resize': True,
  'size': ('squash', 224),
  'resample': Image.Resampling.BILINEAR,
  'do_center_crop': False,
  'crop_size': ('squash', 224),
  'do_rescale': True,
  'rescale_factor': 1 / 255,
  'do_normalize': True,
  'image_mean': (0.5, 0.5, 0.5),
  'image_std': (0.5, 0.5, 0.5),
}
_DEIT = {
  'size': ('squash', 256),
  'resample': Image.Resampling.BICUBIC,
  'do_center_crop': True,
}
_CLIP = {
  'size': ('shorter_side', 224),
  'resample': Image.Resampling.BICUBIC,
  'do_center_crop': True,
  'image_mean': (0.48145466, 0.4578275, 0.40821073),
  'image_std': (0.26862954, 0.26130258, 0.27577711),
}
_DETR = {
  # `of_detector` reads the size.
  'image_mean': (0.485, 0.456, 0.406),
  'image_std': (0.229, 0.224, 0.225),
  'do_pad': True,
  'do_convert_annotations': True,
}
_PROCESSORS = {
  **{'ViT': _VIT, 'DeiT': _VIT | _DEIT},
  **{'CLIP': _VIT | _CLIP, 'Llava': _VIT | _CLIP, 'Detr': _VIT | _DETR},
}
_DEFAULT = {
  'detr': 'Detr',
  **dict.fromkeys(('clip', 'clip_vision_model', 'llava'), 'CLIP'),
  'deit': 'DeiT',
}
# Settings to ignore: our images are always RGB, and labels come from the data.
_HARMLESS = ('do_convert_rgb', 'do_reduce_labels')


def _processor(fields, model_type) -> dict[str, Any]:
  """Returns fields of `Beside` from those of a `preprocessor_config.json`."""
  unfollowed = []
  kinds = map(fields.get, ('image_processor_type', 'feature_extractor_type'))
  default_kind = _DEFAULT.get(model_type, 'ViT')
  kind = str(next(filter(None, kinds), default_kind))
  family = re.sub('(ImageProcessor|FeatureExtractor)(Fast|Pil)?$', '', kind)
  if family not in _PROCESSORS:
    unfollowed.append(f'image_processor_type={kind}')
  defaults = _PROCESSORS.get(family, _VIT)

  def get(name, read):
    if (value := fields.get(name)) is None:
      return defaults[name]
    if (result := read(value)) is None:
      unfollowed.append(f'{name}={value}')
      return defaults[name]
    return result

  unfollowed += [
    f'{name}={value}'
    for name, value in fields.items()
    if name.startswith('do_') and value and name not in (*defaults, *_HARMLESS)
  ]
  # Our `normalize` divides pixels by 255 first; a processor multiplies them by
  # `rescale_factor` or by nothing. Convert its mean and std to our scale.
  scale = 255.0
  if get('do_rescale', bool):
    scale *= get('rescale_factor', _number)
  mean, std = (0.0,) * 3, (1.0,) * 3
  if get('do_normalize', bool):
    mean, std = get('image_mean', _channels), get('image_std', _channels)
  resizes = get('do_resize', bool)
  (resize, full), resample = get('size', _size), get('resample', _filter)
  if family == 'CLIP' and isinstance(fields.get('size'), int):
    resize = 'shorter_side'  # In other processors, a number is both sides.
  size, fraction = full, 1.0
  if get('do_center_crop', bool):
    _, size = get('crop_size', _size)
    resize, fraction = (resize, size / full) if resizes else ('none', 1.0)
  elif not resizes or resize != 'squash':
    # Without a crop, images would not have the model's input size, and
    # transformers would refuse them.
    unfollowed.append(f'size={fields.get("size")}, do_resize={resizes}')
    resize, size = (resize, full) if resizes else ('squash', None)
  return {
    'image_size': size,
    'unfollowed': tuple(unfollowed),
    'pictures': {
      'mean': tuple(x / scale for x in mean),
      'std': tuple(x / scale for x in std),
      'resample': resample,
      'resize': resize,
      'crop_fraction': fraction,
    },
  }


def _pretrained_cfg(fields) -> dict[str, Any]:
  """Returns fields of `Beside` from timm's `config.json`."""
  modes = {'center': 'shorter_side', 'squash': 'squash'}
  mode, fraction = fields.get('crop_mode'), fields.get('crop_pct')
  size = fields.get('input_size')
  size = _number(size[-1]) if isinstance(size, list) and size else None
  if size and _number(fraction):
    # timm resizes images to `size / fraction`, rounded down to whole pixels.
    fraction = size / max(1, math.floor(size / fraction))
  pictures = {
    'mean': _channels(fields.get('mean')),
    'std': _channels(fields.get('std')),
    'resample': _filter(fields.get('interpolation')),
    'resize': modes.get(mode),
    'crop_fraction': _number(fraction),
    'rounding': 'even' if _number(fraction) else None,
  }
  unsupported = mode is not None and mode not in modes
  return {
    'image_size': size,
    'unfollowed': (f'crop_mode={mode}',) if unsupported else (),
    'pictures': {k: v for k, v in pictures.items() if v is not None},
  }


# The functions below return None for a value of the wrong type or range.


def _number(value) -> float | None:
  return value if isinstance(value, numbers.Real) and 0 < value < 1e9 else None


def _channels(values) -> tuple[float, float, float] | None:
  values = [values] * 3 if isinstance(values, numbers.Real) else values
  if not isinstance(values, list) or len(values) != 3:
    return None
  finite = (isinstance(x, numbers.Real) and math.isfinite(x) for x in values)
  return tuple(map(float, values)) if all(finite) else None


def _filter(value) -> Image.Resampling | None:
  with contextlib.suppress(KeyError, ValueError):
    if isinstance(value, str):
      return Image.Resampling[value.upper()]
    return Image.Resampling(value)
  return None


def _size(value) -> tuple[str, int] | None:
  """Returns the way of resizing (a `resize.Resize`) and a side in pixels."""
  resize, sides = 'squash', [value]
  if isinstance(value, dict):
    sides = list(value.values())
    if set(value) == {'shortest_edge'}:
      resize = 'shorter_side'
    elif set(value) != {'height', 'width'}:
      return None
  side = sides[0]
  if any(other != side for other in sides) or not (_number(side) or 0) >= 1:
    return None
  return resize, int(side)

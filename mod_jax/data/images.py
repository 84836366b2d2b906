"""Batches of labelled images: digits, scenes, folders, TensorFlow Datasets.

Everything here is NumPy; the training loop places batches on devices. A batch
is a dict of arrays (S is `config.image_size`, V the number of classes):

  image   float32 [B, S, S, 3]  `(value / 255 - mean) / std`
  target  float32 [B, V]        training: soft labels; rows sum to 1, except
                                with a table of labels
  label   int32 [B]             evaluation; with a table of labels, where any
                                number may be true, 0 or 1 as int32 [B, V]
  weight  float32 [B]           evaluation: 0 for rows that only fill a batch

`Preprocess` says how images are resized and cropped for evaluation, which
`resize` does. Decoding and augmentation run inside Grain, in threads or worker
processes.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import os
import sys
from typing import Annotated, Any, Literal

import grain
import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import errors, paths
from mod_jax.data import augment as augment_lib
from mod_jax.data import (
  batches,
  common,
  digits,
  image_cache,
  image_folder,
  label_table,
  tfds_images,
)
from mod_jax.data import resize as resize_lib
from mod_jax.data.scenes import SceneConfig, Scenes

# Mean and standard deviation of channels whose values lie in [0, 1].
_Mean = Annotated[float, config_lib.Range(ge=-1e3, le=1e3)]
_Std = Annotated[float, config_lib.Range(ge=1e-6, le=1e3)]
# Below .1, images would be resized to huge ones that are mostly cropped away.
_Crop = Annotated[float, config_lib.Range(ge=0.1, le=10)]
# Names of classes and the weights of their losses; the others weigh 1.
_ClassWeights = tuple[tuple[str, config_lib.Weight], ...]
Resample = Literal[
  'nearest', 'lanczos', 'bilinear', 'bicubic', 'box', 'hamming'
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess:
  """Converts images to a model's input as in evaluation.

  Attributes:
    image_size: height and width of the input in pixels.
    crop_fraction: side of the centred square crop over the resized image's
      shorter side; above 1, the image gets a black border.
    mean: subtracted from values in [0, 1], per channel.
    std: divided by, per channel.
    resample: Pillow's filter.
    resize: 'shorter_side', 'squash' or 'none', as in `resize.Resize`.
    rounding: where the crop begins, as in `resize.Rounding`.
  """

  image_size: int
  crop_fraction: float
  mean: tuple[float, float, float]
  std: tuple[float, float, float]
  resample: Image.Resampling = Image.Resampling.BICUBIC
  resize: resize_lib.Resize = 'shorter_side'
  rounding: resize_lib.Rounding = 'down'

  def apply_to(self, data: 'ImageDataConfig') -> 'ImageDataConfig':
    """Returns a copy of the config whose evaluation preprocesses this way."""
    fields = vars(self) | {'resample': self.resample.name.lower()}
    return dataclasses.replace(data, **fields)

  @property
  def fit(self) -> functools.partial:
    """The function that resizes and crops an RGB image."""
    return functools.partial(
      resize_lib.center_crop,
      size=self.image_size,
      fraction=self.crop_fraction,
      resample=self.resample,
      resize=self.resize,
      rounding=self.rounding,
    )

  def __call__(self, pictures: Iterable[Any]) -> np.ndarray:
    """Returns the input of a batch, float32 [B, S, S, 3].

    Pictures are paths, Pillow images, or arrays uint8 [height, width, 3].
    Raises UserError for others, and for pictures that cannot be decoded.
    """
    fitted = [np.asarray(self.fit(as_image(picture))) for picture in pictures]
    return resize_lib.normalize(np.stack(fitted), self.mean, self.std)


def as_image(picture) -> Image.Image:
  """Returns a picture, given as in `Preprocess.__call__`, as RGB.

  Files and Pillow images are turned upright, as their EXIF data say.
  """
  if isinstance(picture, str | os.PathLike):
    return image_folder.decode(os.fspath(picture), f'image {str(picture)!r}')
  if isinstance(picture, Image.Image):
    try:
      image_folder.require_white(picture)
      return image_folder.to_rgb(picture)
    except ValueError as error:
      raise errors.UserError(f'a picture cannot be read: {error}.') from error
  array = np.asarray(picture)
  if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
    raise errors.UserError(
      f'a picture of type {array.dtype} and shape {array.shape}: expected bytes'
      ' (uint8) [height, width, 3], a Pillow image or a path.'
    )
  return Image.fromarray(array)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
  """Where images come from and how they become arrays.

  Attributes:
    source: 'digits' are scikit-learn's bundled handwritten digits; 'scenes' are
      pictures with several of these digits and clutter; 'folder' is a directory
      with a folder per class; 'tfds' is a prepared TFDS data set.
    scenes: what scenes are made of, for 'scenes'.
    path: the directory, for 'folder': train/ and eval/ (or val, validation,
      test) with a folder per class in each, or the folders of the classes
      directly.
    label_table: CSV file, by its path from the folder or from /, with any
      number of labels for each picture (`data.label_table`), for 'folder'; the
      model then predicts separately whether each label is true. '' takes the
      folders as classes, one for each picture.
    eval_fraction: part of each class that is held out, chosen by a hash of the
      file names, if the folder has no evaluation split; at least one image.
    name: data set name, or the directory of a prepared one, for 'tfds'.
    data_dir: where TFDS keeps data; None is the default of TFDS.
    train_split: split for training, for 'tfds'.
    eval_split: split for evaluation, for 'tfds'.
    image_size: height and width of the model's input in pixels.
    crop_fraction: for evaluation, side of the centred square crop over the
      resized image's shorter side; above 1, the image gets a black border. None
      is 1 for digits and scenes, and 0.875 for other sources.
    resize: 'shorter_side' keeps an image's aspect ratio; 'squash' makes it
      square; 'none' does not resize.
    rounding: where a crop begins that is centred between two pixels: 'down' is
      the lower one, as in Hugging Face; 'even' the even one, as in timm.
    resample: the filter for resizing; None is 'bilinear' for digits and scenes,
      and 'bicubic' for other sources.
    class_weights: factors on the losses of classes: a table, as in
      (('cat', 2), ('dog', 0.5)), where classes that are not named weigh 1; or
      'balanced', inversely proportional to the number of training pictures and
      1 for a mean class. With a table of labels, the factors are on losses of
      true labels, and 'balanced' gives true and false the same total weight.
    sampling: 'balanced' draws every class equally often in training, so that
      pictures of rare classes repeat; an epoch is still as many draws as there
      are pictures. 'uniform' draws each picture once per epoch.
    unreadable: 'refuse' stops at files that cannot be read; 'skip' leaves them
      out with a warning. A file that fails only when it is decoded is replaced
      by the next example in training, and gets weight 0 in evaluation.
    mean: subtracted from values in [0, 1], per channel.
    std: divided by, per channel.
    augment: augmentation of the training images.
    workers: processes that decode and augment; 0 uses threads in this process.
      The batches do not depend on it.
    cache: keeps decoded pictures for later epochs, reduced as far as the
      augmentation allows; the batches do not depend on it. 'memory' takes at
      most 2 GB for pictures to train on and 2 GB for held-out ones, divided
      among the workers, and decodes further pictures anew; 'disk' takes files
      in `cache_dir`, for all workers and runs; 'none' decodes in every epoch.
    cache_dir: directory for 'disk', which may be emptied at any time; '' is
      ~/.cache/mod_jax/pictures.
  """

  source: Literal['digits', 'scenes', 'folder', 'tfds'] = 'digits'
  scenes: SceneConfig = SceneConfig()
  path: str = ''
  label_table: str = ''
  eval_fraction: config_lib.Proper = 0.1
  name: str = ''
  data_dir: str | None = None
  train_split: str = 'train'
  eval_split: str = 'validation'
  image_size: config_lib.Pixels = 32
  crop_fraction: _Crop | None = None
  resize: resize_lib.Resize = 'shorter_side'
  rounding: resize_lib.Rounding = 'down'
  resample: Resample | None = None
  class_weights: Literal['balanced'] | _ClassWeights | None = None
  sampling: Literal['uniform', 'balanced'] = 'uniform'
  unreadable: Literal['refuse', 'skip'] = 'refuse'
  mean: tuple[_Mean, _Mean, _Mean] = (0.5, 0.5, 0.5)
  std: tuple[_Std, _Std, _Std] = (0.5, 0.5, 0.5)
  augment: augment_lib.AugmentConfig = augment_lib.AugmentConfig()
  workers: config_lib.Workers = 0
  cache: image_cache.Kind = 'memory'
  cache_dir: str = ''

  def __post_init__(self):
    check = config_lib.validate(self)
    paths.require_local(self.cache_dir, 'cache_dir')
    check(
      not self.cache_dir or self.cache == 'disk',
      "cache='disk', or no cache_dir",
      *('cache_dir', 'cache'),
    )
    common.check_source(
      self,
      needed={
        'folder': ['path'],
        'tfds': ['name', 'train_split', 'eval_split'],
      },
      own={
        **{'path': ['folder'], 'label_table': ['folder']},
        **{'name': ['tfds'], 'data_dir': ['tfds']},
      },
    )

  @property
  def multi_label(self) -> bool:
    """Whether any number of labels may be true of a picture."""
    return bool(self.label_table)

  @property
  def preprocess(self) -> Preprocess:
    """Preprocessing of images for evaluation."""
    # Bicubic filters overshoot visibly when 8x8 digits are enlarged.
    fraction, resample = 0.875, 'bicubic'
    if self.source in ('digits', 'scenes'):
      fraction, resample = 1.0, 'bilinear'
    if self.crop_fraction is not None:
      fraction = self.crop_fraction
    return Preprocess(
      image_size=self.image_size,
      crop_fraction=fraction,
      mean=self.mean,
      std=self.std,
      resample=Image.Resampling[(self.resample or resample).upper()],
      resize=self.resize,
      rounding=self.rounding,
    )


def class_names(config: ImageDataConfig) -> tuple[str, ...]:
  """Returns the names of the classes in the order of labels."""
  if config.source == 'tfds':  # TFDS knows them without prepared data.
    return tfds_images.class_names(config.name, config.data_dir or None)
  return open_split(config, 'eval').class_names


def open_split(config: ImageDataConfig, split: Literal['train', 'eval']):
  """Returns the source of a split.

  The source has `class_names`, a length, `labels` of all pictures,
  `fingerprint()`, `name(index)` and `entry(index)`. The last returns a
  picture's key for a cache (or None), a function that decodes the picture, and
  the picture's label.
  """
  if config.source == 'digits':
    return digits.DigitImages(split)
  if config.source == 'scenes':
    return Scenes(config.scenes, config.image_size, split)
  if config.source == 'folder':
    reading = {
      'eval_fraction': config.eval_fraction,
      'unreadable': config.unreadable,
    }
    if config.multi_label:
      table = config.label_table
      return label_table.open_split(config.path, table, split, **reading)
    return image_folder.open_split(config.path, split, **reading)
  return tfds_images.TfdsImages(
    config.name,
    config.train_split if split == 'train' else config.eval_split,
    data_dir=config.data_dir or None,
  )


def class_weights(config: ImageDataConfig) -> np.ndarray | None:
  """Returns the losses' factors by class, float32 [V]; None if none are set."""
  names = class_names(config)
  if config.class_weights is None:
    return None
  if config.class_weights == 'balanced':
    labels = open_split(config, 'train').labels
    if config.multi_label:
      true_V = labels.sum(axis=0)
      false_V = len(labels) - true_V
      return np.float32(np.maximum(false_V, 1) / np.maximum(true_V, 1))
    count_V = np.bincount(labels, minlength=len(names))
    return np.float32(len(labels) / (len(names) * np.maximum(count_V, 1)))
  table = dict(config.class_weights)
  for name in table:
    if name not in names:
      raise errors.UserError(
        f'class_weights: there is no class {name!r} among'
        f' {", ".join(map(repr, names))}.{config_lib.nearest(name, names)}'
      )
  return np.float32([table.get(name, 1.0) for name in names])


def train_iterator(
  config: ImageDataConfig,
  *,
  batch_size: int,
  seed: int,
  shard_index: int = 0,
  shard_count: int = 1,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this shard's training batches.

  Images are reshuffled in every epoch, and the shards together see each image
  once per epoch, unless classes are to be drawn equally often. The batches
  depend only on the data, the config except `workers` and the cache, the seed
  and the position. A global batch, mixup and cutmix included, is the same for
  any number of shards. It is split evenly; the first shard gets the first rows.
  Another number of shards or workers can continue from the iterator's state,
  which is the same on all shards (see `batches.Batches`).
  """
  mixes = config.augment.mixup or config.augment.cutmix
  rows = batch_size * shard_count
  if mixes and rows < 2:
    raise errors.UserError(
      f'batch_size={batch_size}: mixup and cutmix need at least 2 pictures; '
      'raise it or set both to 0'
    )
  pictures = _Pictures(config, 'train')
  batches.require_rows(len(pictures), rows, 'pictures')
  # Shards are cut from the endless sequence and not from an epoch: shards of
  # unequal size would drift apart, and a global batch would mix epochs. Augment
  # before the cut, so that the random numbers depend on an image's position in
  # the global sequence.
  dataset = grain.MapDataset.source(pictures).seed(seed)
  if config.sampling == 'balanced':
    dataset = _Balanced(dataset, _members(pictures.source.labels), seed)
  else:
    dataset = dataset.shuffle().repeat()
  dataset = dataset.random_map(
    functools.partial(_train_row, config, len(pictures.source.class_names))
  )
  # Each image is mixed with the preceding one in the global batch, so a shard
  # also reads the last image of the preceding shard.
  extra = int(bool(mixes) and shard_count > 1)
  start = shard_index * batch_size
  dataset = batches.GlobalRows(dataset, rows, start - extra, batch_size + extra)
  dataset = dataset.batch(batch_size + extra, drop_remainder=True)
  if mixes:
    # Use another seed, so that mixing draws other numbers than augmentation.
    mix_seed = np.random.SeedSequence((seed, 0)).generate_state(1)
    dataset = dataset.random_map(
      functools.partial(augment_lib.mix, config=config.augment),
      seed=int(mix_seed[0]),
    )
  if extra:
    dataset = dataset.map(functools.partial(common.select_rows, start=extra))
  return batches.Batches(dataset, config.workers)


def eval_batches(config: ImageDataConfig, **kwargs) -> Iterator[batches.Batch]:
  """Returns held-out batches; keywords are those of `batches.held_out`."""
  pictures = _Pictures(config, 'eval')
  make_row = functools.partial(_eval_row, config, pictures)
  return batches.held_out(make_row, len(pictures), config.workers, **kwargs)


def denormalize(config, image: Any) -> np.ndarray:
  """Returns images of a batch, [..., 3], as uint8 for display.

  `config` has the `mean` and `std` by which the images were normalised.
  """
  scaled = np.asarray(image, np.float32) * np.float32(config.std)
  scaled = 255 * (scaled + np.float32(config.mean))
  return np.clip(np.round(scaled), 0, 255).astype(np.uint8)


class _Pictures:
  """The pictures of a split of any source, fitted and cached."""

  def __init__(self, config: ImageDataConfig, split: Literal['train', 'eval']):
    self.source = open_split(config, split)
    self._skip = config.unreadable == 'skip'
    fit = config.preprocess.fit
    if split == 'train':
      fit = functools.partial(fit, fraction=1.0)
    if split == 'train' and config.augment.crop == 'random_resized':
      fit = functools.partial(
        augment_lib.reduce,
        size=config.image_size,
        min_scale=config.augment.min_scale,
      )
    directory = config.cache_dir or '~/.cache/mod_jax/pictures'
    self._cache = image_cache.Cache(
      fit=fit,
      kind=config.cache,
      directory=os.path.expanduser(directory),
      owner=(config, split),
      processes=max(1, config.workers),
    )

  def __len__(self) -> int:
    return len(self.source)

  def load(self, index: int) -> tuple[Image.Image, Any] | None:
    """Returns a picture and its label; None if it is unreadable and skipped."""
    try:
      key, decode, label = self.source.entry(index)
      return self._cache.load(key, decode), label
    except image_folder.UnreadableImageError as e:
      if not self._skip:
        raise image_folder.UnreadableImageError(
          f"{e}, or set unreadable='skip'"
        ) from e
      common.warn_once(f'left out: {e}')

  def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
    """Returns a picture to train on and its label, or the next readable one."""
    for step in range(len(self)):
      loaded = self.load((int(index) + step) % len(self))
      if loaded is not None:
        return loaded
    raise errors.UserError(
      f'none of the {len(self)} pictures to train on can be decoded: repair '
      'them or choose other data'
    )


def _train_row(
  config: ImageDataConfig,
  classes: int,
  element: tuple[Image.Image, Any],
  rng: np.random.Generator,
) -> dict[str, np.ndarray]:
  image, label = element
  array = augment_lib.augment(
    image,
    rng,
    config.augment,
    size=config.image_size,
    mean=config.mean,
    std=config.std,
    resample=config.preprocess.resample,
  )
  smoothing = config.augment.label_smoothing
  if config.multi_label:
    target = augment_lib.soft_labels(label, smoothing)
  else:
    target = augment_lib.soft_target(label, classes, smoothing)
  return {'image': array, 'target': target}


def _eval_row(
  config: ImageDataConfig, pictures: _Pictures, index: np.integer
) -> dict[str, np.ndarray]:
  loaded = None if index == batches.PADDING else pictures.load(int(index))
  array = np.zeros((config.image_size, config.image_size, 3), np.float32)
  label = 0
  if config.multi_label:
    label = np.zeros(len(pictures.source.class_names))
  if loaded is not None:
    image, label = loaded
    array = resize_lib.normalize(image, config.mean, config.std)
  return {
    'image': array,
    'label': np.asarray(label, np.int32),
    'weight': np.float32(loaded is not None),
  }


def _members(labels: np.ndarray) -> list[np.ndarray]:
  """Returns the indices of the pictures of each class.

  With a table of labels, each label is such a class, and pictures without a
  label are another. Classes without pictures are left out.
  """
  if labels.ndim == 1:
    labels = labels[:, None] == np.unique(labels)
  else:
    labels = np.column_stack([labels, ~labels.any(axis=1)])
  members = (np.flatnonzero(column) for column in labels.T)
  return [pictures for pictures in members if pictures.size]


class _Balanced(grain.MapDataset):
  """Draws from its parent every class equally often, without end.

  In V draws, each of V classes comes once, in a new random order. Each picture
  of a class comes once before any of them comes again. An element depends only
  on the seed and on its index. `members` are the result of `_members`.
  """

  def __init__(
    self, parent: grain.MapDataset, members: list[np.ndarray], seed: int
  ):
    super().__init__(parent)
    # Derive separate seeds, since the seeds of epochs count up from `seed`.
    sequence = np.random.SeedSequence((seed, 1))
    first, *seeds = sequence.generate_state(1 + len(members)).tolist()
    order = grain.MapDataset.range(len(members))
    self._order = order.seed(first).shuffle().repeat()
    self._members = [
      grain.MapDataset.source(pictures).seed(own).shuffle().repeat()
      for pictures, own in zip(members, seeds, strict=True)
    ]

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    pictures = self._members[self._order[index]]
    return self._parent[int(pictures[index // len(self._members)])]

"""Batches of labelled pictures, from digits, folders or TensorFlow Datasets.

Everything here is numpy; placing a batch on devices is the training loop's. A
batch is a dict of arrays (S is `config.image_size`, V the number of classes):

  image   float32 [B, S, S, 3]  `(value / 255 - mean) / std`
  target  float32 [B, V]        training: soft labels, each row sums to 1
  label   int32 [B]             evaluation
  weight  float32 [B]           evaluation: 0 for rows that only fill a batch

Decoding and augmentation run inside Grain, in threads or worker processes.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import functools
import os
import signal
from typing import Annotated, Any, Literal, Protocol

from absl import flags, logging
import grain
import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import errors
from mod_jax.data import augment as augment_lib
from mod_jax.data import common, digits, image_folder, tfds_images

Batch = dict[str, np.ndarray]

# Threads, and batches kept ready, without worker processes. Pillow lets other
# threads run while it decodes.
_THREADS = 4
# Batches that each worker process keeps ready.
_WORKER_BUFFER = 2
# Each worker process reads in a single thread, and makes one batch at a time.
_WORKER_OPTIONS = {'num_threads': 1, 'prefetch_buffer_size': 1}
# Mean and standard deviation of channels whose values lie in [0, 1].
_Mean = Annotated[float, config_lib.Range(ge=-1e3, le=1e3)]
_Std = Annotated[float, config_lib.Range(ge=1e-6, le=1e3)]
_Crop = Annotated[float, config_lib.Range(ge=0.01, le=10)]
Resample = Literal[
  'nearest', 'lanczos', 'bilinear', 'bicubic', 'box', 'hamming'
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess:
  """What turns pictures into a model's input, as evaluation does.

  Attributes:
    image_size: pixels a side.
    crop_fraction: as of `ImageDataConfig`, and so are all others.
    mean: see there.
    std: see there.
    resample: Pillow's filter.
    resize: see there.
  """

  image_size: int
  crop_fraction: float
  mean: tuple[float, float, float]
  std: tuple[float, float, float]
  resample: Image.Resampling = Image.Resampling.BICUBIC
  resize: augment_lib.Resize = 'shorter_side'

  def apply_to(self, data: 'ImageDataConfig') -> 'ImageDataConfig':
    """Returns the config of data that are evaluated so."""
    fields = vars(self) | {'resample': self.resample.name.lower()}
    return dataclasses.replace(data, **fields)

  def one(self, image: Image.Image) -> np.ndarray:
    """Returns [S, S, 3], float32, of a picture in RGB."""
    image = augment_lib.center_crop(
      image,
      self.image_size,
      fraction=self.crop_fraction,
      resample=self.resample,
      resize=self.resize,
    )
    return augment_lib.normalize(image, self.mean, self.std)

  def __call__(self, pictures: Iterable[Any]) -> np.ndarray:
    """Returns [B, S, S, 3], float32.

    Args:
      pictures: paths, Pillow images, or arrays [height, width, 3] of bytes.

    Raises:
      errors.UserError: a picture is none of these, or cannot be decoded.
    """
    return np.stack([self.one(_as_image(picture)) for picture in pictures])


def _as_image(picture) -> Image.Image:
  if isinstance(picture, str | os.PathLike):
    return image_folder.decode(os.fspath(picture), f'image {str(picture)!r}')
  if isinstance(picture, Image.Image):
    try:
      if reason := image_folder.without_white(picture):
        raise ValueError(reason)
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
  """Where pictures come from and how they become arrays.

  Attributes:
    source: 'digits' are scikit-learn's bundled handwritten digits; 'folder' a
      directory with a folder per class; 'tfds' a prepared TFDS data set.
    path: the directory, for 'folder': train/ and eval/ (or val, validation,
      test) with a folder per class in each, or the folders of the classes
      directly.
    eval_fraction: part of each class that is held out, by a hash of each
      file's name, of a folder that has no split of its own; at least a picture.
    name: data set name, or the directory of a prepared one, for 'tfds'.
    data_dir: where TFDS keeps data; None is its own default.
    train_split: split for training, for 'tfds'.
    eval_split: split for evaluation, for 'tfds'.
    image_size: pixels a side that the model gets.
    crop_fraction: side of the centred square that evaluation looks at, over the
      resized picture's shorter side; above 1 it has a black border. None is 1
      for digits and 0.875 for the rest.
    resize: 'shorter_side' keeps a picture's aspect; 'squash' makes it a square;
      'none' takes its pixels as they are.
    resample: the filter that resizes; None is 'bilinear' for digits and
      'bicubic' for the rest.
    unreadable: 'refuse' stops at files that cannot be read; 'skip' leaves them
      out with a warning. One that is found only at decoding is replaced in
      training by the next example, and gets weight 0 in evaluation.
    mean: subtracted from values in [0, 1], per channel.
    std: divided by, per channel.
    augment: of the training pictures.
    workers: processes that decode and augment; 0 is threads in this process.
      The batches do not depend on it.
  """

  source: Literal['digits', 'folder', 'tfds'] = 'digits'
  path: str = ''
  eval_fraction: config_lib.Proper = 0.1
  name: str = ''
  data_dir: str | None = None
  train_split: str = 'train'
  eval_split: str = 'validation'
  image_size: config_lib.Pixels = 32
  crop_fraction: _Crop | None = None
  resize: augment_lib.Resize = 'shorter_side'
  resample: Resample | None = None
  unreadable: Literal['refuse', 'skip'] = 'refuse'
  mean: tuple[_Mean, _Mean, _Mean] = (0.5, 0.5, 0.5)
  std: tuple[_Std, _Std, _Std] = (0.5, 0.5, 0.5)
  augment: augment_lib.AugmentConfig = augment_lib.AugmentConfig()
  workers: config_lib.Workers = 0

  def __post_init__(self):
    """Refuses settings that cannot work or would silently do nothing."""
    config_lib.validate(self)
    common.check_source(
      self,
      needed={
        'folder': ['path'],
        'tfds': ['name', 'train_split', 'eval_split'],
      },
      own={'path': ['folder'], 'name': ['tfds'], 'data_dir': ['tfds']},
    )

  @property
  def preprocess(self) -> Preprocess:
    """What evaluation does with pictures."""
    digital = self.source == 'digits'
    fraction = self.crop_fraction
    if fraction is None:
      fraction = 1.0 if digital else 0.875
    return Preprocess(
      image_size=self.image_size,
      crop_fraction=fraction,
      mean=self.mean,
      std=self.std,
      resample=_resample(self),
      resize=self.resize,
    )


def class_names(config: ImageDataConfig) -> tuple[str, ...]:
  """Returns the names of the classes, in the order of labels; reads no picture.

  Raises:
    errors.UserError: the data are not there, or have fewer than two classes.
  """
  if config.source == 'digits':
    return digits.CLASSES
  if config.source == 'folder':
    return image_folder.class_names(config.path)
  return tfds_images.class_names(config.name, data_dir=config.data_dir or None)


def num_examples(
  config: ImageDataConfig, split: Literal['train', 'eval'] = 'train'
) -> int:
  """Returns the number of pictures to train on, or of those held out.

  Raises:
    errors.UserError: they cannot be read.
  """
  return len(_open(config, split))


def fingerprint(config: ImageDataConfig) -> dict[str, Any]:
  """Returns what identifies the data.

  Raises:
    errors.UserError: they cannot be read.
  """
  return {
    'source': config.source,
    'train': _open(config, 'train').fingerprint(),
    'held_out': _open(config, 'eval').fingerprint(),
  }


def train_iterator(
  config: ImageDataConfig,
  *,
  batch_size: int,
  seed: int,
  shard_index: int = 0,
  shard_count: int = 1,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this shard's training batches.

  The order is shuffled anew in every epoch, and the shards together see each
  picture once per epoch. Everything is a function of the data, the config, the
  seed and the position alone, and not of `config.workers`. A global batch is
  the same however many shards share it, mixup and cutmix included: each takes
  equally many rows, the first shard the first. Arguments are as of
  `text.train_iterator`; the seed is of the augmentation, too.

  Returns:
    A Grain iterator of batches with 'image' and 'target' (see the module).
    `get_state()` is a small JSON-ready dict, the same on all shards, and
    `set_state()` goes on with the batch after it, also with another number of
    shards or workers. `close()` ends its threads and processes.

  Raises:
    errors.UserError: the data cannot be read or are less than a global batch;
      while iterating, a picture cannot be decoded.
  """
  common.check_request(batch_size, shard_index, shard_count, seed=seed)
  mixes = config.augment.mixup or config.augment.cutmix
  rows = batch_size * shard_count
  if mixes and rows < 2:
    raise errors.UserError(
      f'batch_size={batch_size}: mixup and cutmix need at least 2 pictures; '
      'raise it or set both to 0'
    )
  source = _open(config, 'train')
  if len(source) < rows:
    raise errors.UserError(
      f'there are {len(source)} pictures to train on, fewer than the {rows} of '
      f'one batch ({batch_size} on each of {shard_count} shards): add some or '
      'lower the batch size'
    )
  # Shards are cut from the endless sequence, not from an epoch: parts of
  # unequal size would drift apart and see different epochs in one global batch.
  # Augmentation is drawn before the cut, by a picture's place in the sequence.
  dataset = grain.MapDataset.source(_Readable(source, config)).seed(seed)
  dataset = dataset.shuffle().repeat()
  dataset = dataset.random_map(_Augment(config, len(source.class_names)))
  # Each picture is mixed with the one before it in the global batch, so a shard
  # reads the last of the shard before it, too.
  extra = int(bool(mixes) and shard_count > 1)
  start = shard_index * batch_size
  dataset = _Rows(dataset, rows, start - extra, batch_size + extra)
  dataset = dataset.batch(batch_size + extra, drop_remainder=True)
  if mixes:
    # It has a seed of its own, lest its draws repeat those of the augmentation.
    mix_seed = np.random.SeedSequence((seed, 0)).generate_state(1)
    dataset = dataset.random_map(_Mix(config.augment), seed=int(mix_seed[0]))
  if extra:
    dataset = dataset.map(common.Rows(extra))
  return _Batches(dataset, config.workers)


def eval_batches(
  config: ImageDataConfig,
  *,
  batch_size: int,
  num_batches: int | None = None,
  shard_index: int = 0,
  shard_count: int = 1,
) -> Iterator[Batch]:
  """Returns this shard's held-out batches, always the same in the same order.

  Shards, padding and arguments are as of `text.eval_batches`: without a limit
  every held-out picture counts exactly once over all batches of all shards.

  Returns:
    A finite iterator of batches with 'image', 'label' and 'weight' (see the
    module).

  Raises:
    errors.UserError: nothing is held out, or it cannot be read; while
      iterating, a picture cannot be decoded.
  """
  common.check_request(
    batch_size, shard_index, shard_count, num_batches=num_batches
  )
  source = _open(config, 'eval')
  rows = batch_size * shard_count
  count = len(source)
  if num_batches is not None:
    count = min(count, num_batches * rows)
  batches = -(-count // rows)
  places = np.full(batches * rows, _PADDING)
  places[:count] = np.arange(count) * len(source) // count
  # Equally many on every shard: a host with one batch fewer would leave the
  # others waiting in a collective.
  places = places.reshape(batches, shard_count, batch_size)[:, shard_index]
  dataset = grain.MapDataset.source(places.ravel())
  dataset = dataset.map(_Evaluate(source, config)).batch(batch_size)
  return _finite(dataset, min(config.workers, batches))


def denormalize(config: ImageDataConfig, image: Any) -> np.ndarray:
  """Returns pictures as uint8, to look at.

  Args:
    config: its mean and std.
    image: [..., 3], as the model gets them.
  """
  scaled = np.asarray(image, np.float32) * np.float32(config.std)
  scaled = 255 * (scaled + np.float32(config.mean))
  return np.clip(np.round(scaled), 0, 255).astype(np.uint8)


class _Source(Protocol):
  """Labelled pictures with random access."""

  class_names: tuple[str, ...]

  def __len__(self) -> int: ...

  def fingerprint(self) -> dict[str, Any]: ...

  def load(self, index: int) -> tuple[Image.Image, int]: ...


_PADDING = -1  # Instead of an index: a row that only fills a batch.


def _open(config: ImageDataConfig, split: str) -> _Source:
  if split not in ('train', 'eval'):
    raise errors.UserError(f"split={split!r}: expected 'train' or 'eval'")
  if config.source == 'digits':
    return digits.DigitImages(split)
  if config.source == 'folder':
    return image_folder.open_split(
      config.path,
      split,
      eval_fraction=config.eval_fraction,
      unreadable=config.unreadable,
    )
  return tfds_images.TfdsImages(
    config.name,
    config.train_split if split == 'train' else config.eval_split,
    data_dir=config.data_dir or None,
  )


def _resample(config: ImageDataConfig) -> Image.Resampling:
  # Bicubic overshoots visibly where 8 pixels become many.
  usual = 'bilinear' if config.source == 'digits' else 'bicubic'
  return Image.Resampling[(config.resample or usual).upper()]


@functools.cache  # A file is met again in every epoch, and named once.
def _warn(fault: str):
  logging.warning('left out: %s', fault)


def _leave_out(error: image_folder.UnreadableImageError, config):
  """Names a picture that cannot be decoded; raises unless these are skipped."""
  if config.unreadable == 'refuse':
    raise image_folder.UnreadableImageError(
      f"{error}, or set unreadable='skip'"
    ) from error
  _warn(str(error))


class _Readable:
  """The pictures of a source for Grain, without those that do not decode."""

  def __init__(self, source: _Source, config: ImageDataConfig):
    self._source = source
    self._config = config

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> tuple[Image.Image, int]:
    count = len(self._source)
    for step in range(count):
      try:
        return self._source.load((int(index) + step) % count)
      except image_folder.UnreadableImageError as e:
        _leave_out(e, self._config)
    raise errors.UserError(
      f'none of the {count} pictures to train on can be decoded: repair them '
      'or choose other data'
    )


class _Augment(grain.transforms.RandomMap):
  """A decoded picture and its label to a training row."""

  def __init__(self, config: ImageDataConfig, classes: int):
    self._config = config
    self._classes = classes

  def random_map(
    self, element: tuple[Image.Image, int], rng: np.random.Generator
  ) -> dict[str, np.ndarray]:
    image, label = element
    config = self._config
    array = augment_lib.augment(
      image,
      rng,
      config.augment,
      size=config.image_size,
      mean=config.mean,
      std=config.std,
      resample=_resample(config),
      resize=config.resize,
    )
    target = augment_lib.soft_target(
      label, self._classes, config.augment.label_smoothing
    )
    return {'image': array, 'target': target}


class _Mix(grain.transforms.RandomMap):
  """Mixup and cutmix of a batch."""

  def __init__(self, config: augment_lib.AugmentConfig):
    self._config = config

  def random_map(self, element: Batch, rng: np.random.Generator) -> Batch:
    return augment_lib.mix(element, rng, self._config)


class _Rows(grain.MapDataset):
  """Some rows of every global batch, one batch after another."""

  def __init__(
    self, parent: grain.MapDataset, batch: int, start: int, count: int
  ):
    """Takes `count` rows of each `batch` of an endless parent.

    The first is row `start`; -1 is the last.
    """
    super().__init__(parent)
    self._batch, self._start, self._count = batch, start, count

  def __len__(self) -> int:
    return len(self._parent) // self._batch * self._count

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    batch, row = divmod(index, self._count)
    row = (self._start + row) % self._batch
    return self._parent[batch * self._batch + row]


class _Evaluate(grain.transforms.Map):
  """A place in the held-out pictures to a row of evaluation."""

  def __init__(self, source: _Source, config: ImageDataConfig):
    self._source = source
    self._config = config
    self._preprocess = config.preprocess

  def map(self, element: np.integer) -> dict[str, np.ndarray]:
    config = self._config
    size = config.image_size
    empty = {
      'image': np.zeros((size, size, 3), np.float32),
      'label': np.int32(0),
      'weight': np.float32(0),
    }
    if element == _PADDING:
      return empty
    try:
      image, label = self._source.load(int(element))
    except image_folder.UnreadableImageError as e:
      _leave_out(e, config)
      return empty
    return {
      'image': self._preprocess.one(image),
      'label': np.int32(label),
      'weight': np.float32(1),
    }


def _start(dataset: grain.MapDataset, workers: int) -> grain.DatasetIterator:
  """Returns an iterator that reads ahead, in threads or processes."""
  if not workers:
    options = grain.ReadOptions(
      num_threads=_THREADS, prefetch_buffer_size=_THREADS
    )
    return iter(dataset.to_iter_dataset(options))
  if not flags.FLAGS.is_parsed():
    # Grain reads flags of its own, also in a program without `absl.app`.
    flags.FLAGS.mark_as_parsed()
  iterable = dataset.to_iter_dataset(grain.ReadOptions(**_WORKER_OPTIONS))
  options = grain.MultiprocessingOptions(
    num_workers=workers, per_worker_buffer_size=_WORKER_BUFFER
  )
  return iter(iterable.mp_prefetch(options, _outlive_signals))


def _outlive_signals(worker: int, workers: int) -> None:
  """Lets the main process decide when a worker ends.

  Ctrl-C, a terminal that closes, and a scheduler's signals may reach all
  processes of a run at once; the main one still needs batches until all hosts
  have agreed to stop. Grain ends its workers by an event, not by a signal.
  """
  del worker, workers
  for number in (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
  ):
    signal.signal(number, signal.SIG_IGN)


def _finite(dataset: grain.MapDataset, workers: int) -> Iterator[Batch]:
  with contextlib.closing(_start(dataset, workers)) as iterator, _reading():
    yield from iterator


@contextlib.contextmanager
def _reading() -> Iterator[None]:
  """Says in a sentence that a worker process was killed."""
  try:
    yield
  except RuntimeError as e:
    if 'was terminated unexpectedly' not in str(e):
      raise
    raise errors.UserError(
      'a process that reads pictures was killed, as the system does where '
      'memory is short: give fewer data.workers, or more memory; the same '
      'command continues'
    ) from e


class _Batches(grain.DatasetIterator):
  """Batches in order, with a state that is only how many there have been.

  The state of Grain's own iterator holds one part per worker process, so a run
  could not go on with another number of them. Each batch is a function of its
  place alone; to go on is to start from there.
  """

  def __init__(self, dataset: grain.MapDataset, workers: int):
    super().__init__()
    self._dataset = dataset
    self._workers = workers
    self._next_batch = 0
    # Started when first asked: whoever restores a state would start it twice.
    self._iterator = None

  def __next__(self) -> Batch:
    if self._iterator is None:
      self._iterator = _start(self._dataset[self._next_batch :], self._workers)
    with _reading():
      batch = next(self._iterator)
    self._next_batch += 1
    return batch

  def get_state(self) -> dict[str, Any]:
    return {'next_batch': self._next_batch}

  def set_state(self, state: dict[str, Any]):
    self.close()
    self._next_batch = int(state['next_batch'])

  def close(self):
    """Ends the threads or processes; the next batch starts them again."""
    if self._iterator is not None:
      self._iterator.close()
      self._iterator = None

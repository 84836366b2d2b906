"""Batches of recordings with transcripts: synthetic speech, or a folder.

Everything here is NumPy. A batch is a dict of arrays, of B rows, T samples, L
frames and U characters, where T and L are the lengths of one bucket:

  wave     float32 [B, T]  samples at mean 0 and variance 1, zeros after the end
  valid    bool [B, L]     False for frames of padding
  labels   int32 [B, U]    characters, then zeros
  count    int32 [B]       number of characters
  masked   bool [B, L]     training: frames that SpecAugment hides
  weight   float32 [B]     evaluation: 0 for rows that only fill a batch
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import sys
from typing import Annotated, Any, Literal

from absl import logging
import grain
import numpy as np

from mod_jax import config as config_lib
from mod_jax.data import audio_files, batches, common, formants
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data.characters import Characters
from mod_jax.errors import UserError

Batch = dict[str, np.ndarray]
_Split = Literal['train', 'eval']
_Seconds = Annotated[float, config_lib.Range(ge=0.01, le=600)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioDataConfig:
  """Where recordings come from and how they become arrays.

  Attributes:
    source: 'words' is synthetic speech (`data.formants`); 'folder' a directory
      of recordings, in a layout of `audio_files.recordings`.
    path: the directory, for 'folder'.
    vocabulary: path of a `vocab.json`; '' makes a vocabulary from the training
      transcripts.
    rate: samples per second that the model reads; recordings are resampled.
    buckets: lengths in seconds, ascending, to one of which each recording is
      padded; recordings longer than the last are left out.
    num_train: number of utterances to train on, for 'words'.
    num_eval: number of held-out utterances, which have other word sequences,
      for 'words'.
    words: most words of an utterance, for 'words'.
    mask_probability: fraction of frames that spans of SpecAugment cover, if
      none overlap (Park et al. 2019).
    mask_span: frames of a span.
    min_masks: least number of spans in a recording.
  """

  source: Literal['words', 'folder'] = 'words'
  path: str = ''
  vocabulary: str = ''
  rate: Annotated[int, config_lib.Range(ge=1000, le=192_000)] = 16_000
  buckets: tuple[_Seconds, ...] = (4.0, 8.0, 16.0)
  num_train: config_lib.PositiveCount = 1024
  num_eval: config_lib.PositiveCount = 64
  words: config_lib.Unrolled = 3
  mask_probability: config_lib.BelowOne = 0.05
  mask_span: config_lib.Size = 10
  min_masks: config_lib.Count = 2

  def __post_init__(self):
    check = config_lib.validate(self)
    check(
      self.buckets and list(self.buckets) == sorted(set(self.buckets)),
      'at least one length, ascending',
      'buckets',
    )
    common.check_source(
      self,
      needed={'folder': ['path']},
      own={'path': ['folder'], 'vocabulary': ['folder']},
    )

  @property
  def samples(self) -> tuple[int, ...]:
    """The lengths of the buckets in samples."""
    return tuple(round(seconds * self.rate) for seconds in self.buckets)


def make_vocabulary(config: AudioDataConfig) -> Characters:
  """Reads the config's vocabulary file; without one, makes a vocabulary.

  It is made of the known words for 'words', else of the training transcripts.
  """
  if config.vocabulary:
    return Characters.read(config.vocabulary)
  if config.source == 'words':
    return Characters.of_texts(formants.WORDS)
  listed = audio_files.recordings(config.path, 'train')
  return Characters.of_texts(recording.text for recording in listed)


class Recordings:
  """The recordings of a split that fit a bucket, with their labels.

  Recordings that cannot be read, are too long or have characters outside the
  vocabulary are left out, with one warning for each kind of fault.

  Attributes:
    texts: the transcripts, in the spelling of the vocabulary.
    labels: the labels of each transcript.
    bucket_N: the index of each recording's bucket.
    longest: number of labels of the longest transcript.
  """

  def __init__(
    self, config: AudioDataConfig, split: _Split, vocabulary: Characters
  ):
    self._config = config
    if config.source == 'words':
      found = _synthetic(config, split)
    else:
      found = _of_folder(config, split)
    self.texts, self.labels, self._waves, buckets = [], [], [], []
    faults: dict[str, list[str]] = {}
    limit = config.samples[-1]
    for name, text, samples_T in found:
      text = vocabulary.spelled(text)
      kind = fault = ''
      if isinstance(samples_T, UserError):
        # Messages about the same kind of fault end with the same advice.
        fault = str(samples_T)
        kind = fault.rpartition(':')[2]
      elif len(samples_T) > limit:
        kind = 'too long'
        fault = (
          f'{len(samples_T) / config.rate:.2f} seconds are longer than the last'
          f' of data.buckets={config.buckets}'
        )
      else:
        try:
          labels = vocabulary.encode(text)
        except ValueError as error:
          kind, fault = 'unknown characters', str(error)
      if kind:
        faults.setdefault(kind, []).append(f'{name}: {fault}')
        continue
      self.texts.append(text)
      self.labels.append(labels)
      self._waves.append(samples_T)
      buckets.append(int(np.searchsorted(config.samples, len(samples_T))))
    for named in faults.values():
      logging.warning(
        'left out of %s: %s%s',
        *(split, named[0]),
        f' (and {len(named) - 1} more like it)' if named[1:] else '',
      )
    if not self.texts:
      raise UserError(
        f'no recording of the split {split!r} can be used: see the warnings for'
        ' what is wrong with each.'
      )
    self.bucket_N = np.array(buckets)
    self.longest = max(map(len, self.labels))
    if split == 'train' and not self.longest:
      raise UserError(
        f'{config.path}: of {len(self)} recordings to train on, no transcript'
        ' has a character; see that its lists have the texts.'
      )

  def __len__(self) -> int:
    return len(self.texts)

  def fingerprint(self) -> dict[str, Any]:
    """Returns the fingerprint of a sample of recordings and of all labels."""
    labels = [np.array(labels) for labels in self.labels]
    return fingerprints.of_records(self._waves) | {
      'labels': fingerprints.of_value(labels)
    }

  def rows(
    self,
    indices: np.ndarray,
    frames: Callable[[Any], Any],
    rng: np.random.Generator | None = None,
  ) -> Batch:
    """Returns a batch of recordings, padded to the largest of their buckets.

    The index -1 gives an empty row. `frames(samples)` returns the number of
    frames of a number of samples. `rng` draws the spans of SpecAugment; with
    None, the batch is for evaluation.
    """
    config, size = self._config, len(indices)
    length = config.samples[max(self.bucket_N[i] for i in indices if i >= 0)]
    wave_BT = np.zeros((size, length), np.float32)
    label_BU = np.zeros((size, max(1, self.longest)), np.int32)
    count_B = np.zeros(size, np.int32)
    frames_B = np.zeros(size, np.int32)
    for row, i in enumerate(indices):
      if i >= 0:
        samples_T, labels = self._waves[i], self.labels[i]
        wave_BT[row, : len(samples_T)] = audio_files.normalize(samples_T)
        label_BU[row, : len(labels)] = labels
        count_B[row] = len(labels)
        frames_B[row] = max(0, frames(len(samples_T)))
    valid_BL = np.arange(frames(length)) < frames_B[:, None]
    batch = {
      'wave': wave_BT,
      'valid': valid_BL,
      'labels': label_BU,
      'count': count_B,
    }
    if rng is None:
      return batch | {'weight': np.float32(indices >= 0)}
    masked_BL = np.zeros_like(valid_BL)
    for row, real in enumerate(frames_B):
      masked_BL[row] = _spans(rng, valid_BL.shape[1], real, config)
    return batch | {'masked': masked_BL}


def _spans(rng, length, real, config: AudioDataConfig):
  """Returns masked_L: True in random spans within the first `real` frames."""
  masked_L, span = np.zeros(length, bool), config.mask_span
  if not config.mask_probability or real <= span:
    return masked_L
  count = int(config.mask_probability * real / span + rng.uniform())
  count = min(max(count, config.min_masks), real // span)
  for start in rng.choice(real - span + 1, count, replace=False):
    masked_L[start : start + span] = True
  return masked_L


@functools.cache
def _synthetic(config: AudioDataConfig, split: _Split):
  """Returns name, text and samples of each utterance.

  The word sequences of the two splits differ.
  """
  rng = np.random.default_rng(0)
  held_out = []
  while len(held_out) < config.num_eval:
    text = formants.sentence(rng, rng.integers(1, config.words + 1))
    # Held-out texts must be new sequences of words; one word is not a new one.
    if ' ' in text or config.words == 1:
      held_out.append(text)
  texts = held_out
  if split == 'train':
    rng, texts, unseen = np.random.default_rng(1), [], set(held_out)
    while len(texts) < config.num_train:
      text = formants.sentence(rng, rng.integers(1, config.words + 1))
      if text not in unseen or config.words == 1:
        texts.append(text)
  return [
    (
      f'utterance {i}',
      text,
      audio_files.resample(
        formants.speak(rng, text), formants.RATE, config.rate
      ),
    )
    for i, text in enumerate(texts)
  ]


def _of_folder(config: AudioDataConfig, split: _Split):
  """Yields name, text, and samples, or in their place the file's UserError."""
  for recording in audio_files.recordings(config.path, split):
    try:
      samples_T, rate = audio_files.read(recording.path, recording.rate)
      samples_T = audio_files.resample(samples_T, rate, config.rate)
    except UserError as error:
      samples_T = error
    yield recording.name, recording.text, samples_T


class _Endless:
  """Random access to training batches, mostly of recordings of one bucket each.

  A batch depends only on the data, the seed and the number of the batch.
  """

  def __init__(self, recordings: Recordings, frames, rows: int, seed: int):
    self._recordings, self._frames = recordings, frames
    self._rows, self._seed = rows, seed
    self._epoch = functools.lru_cache(2)(self._plan)

  def _plan(self, epoch: int) -> np.ndarray:
    """Returns the indices of the recordings of an epoch's batches.

    Their shape is [batches, rows]. Recordings of a bucket that do not fill a
    batch share one with recordings of the next longer bucket.
    """
    rng = np.random.default_rng((self._seed, epoch))
    batches = len(self._recordings) // self._rows
    # The recordings that are left out, as they fill no batch, vary by epoch.
    order_N = rng.permutation(len(self._recordings))[: batches * self._rows]
    by_bucket = np.argsort(self._recordings.bucket_N[order_N], kind='stable')
    return rng.permutation(order_N[by_bucket].reshape(batches, self._rows))

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, number: int) -> Batch:
    epoch, batch = divmod(number, len(self._recordings) // self._rows)
    rng = np.random.default_rng((self._seed, 1, number))
    return self._recordings.rows(self._epoch(epoch)[batch], self._frames, rng)


def train_iterator(
  recordings: Recordings,
  frames: Callable[[Any], Any],
  *,
  batch_size: int,
  seed: int,
  shard_index: int = 0,
  shard_count: int = 1,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this shard's training batches.

  It is as in `data.images.train_iterator`, `frames` as in `Recordings.rows`.
  """
  rows = batch_size * shard_count
  batches.require_rows(len(recordings), rows, 'recordings')
  # Each shard makes the whole global batch and takes its rows, so that the
  # batch does not depend on the number of shards.
  dataset = grain.MapDataset.source(_Endless(recordings, frames, rows, seed))
  start = shard_index * batch_size
  dataset = dataset.map(
    functools.partial(common.select_rows, start=start, stop=start + batch_size)
  )
  return batches.Batches(dataset, workers=0)


def eval_batches(
  recordings: Recordings,
  frames,
  *,
  batch_size: int,
  num_batches: int | None = None,
  shard_index: int = 0,
  shard_count: int = 1,
) -> Iterator[Batch]:
  """Yields this shard's held-out batches, shortest recordings first.

  `num_batches` is as in `batches.held_out`, `frames` as in `Recordings.rows`.
  """
  order_N = np.argsort(recordings.bucket_N, kind='stable')
  rows = batch_size * shard_count
  index = batches.eval_indices(len(recordings), rows, num_batches, 0, 1)
  start = shard_index * batch_size
  for numbers in index.reshape(-1, rows):
    real = numbers != batches.PADDING
    indices = np.where(real, order_N[numbers], batches.PADDING)
    batch = recordings.rows(indices, frames)
    yield common.select_rows(batch, start, start + batch_size)

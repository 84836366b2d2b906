"""Recordings: files, lists of files with transcripts, and resampling.

SciPy reads WAV; other formats need soundfile, which the extra `speech` has.
"""

from collections.abc import Iterator
import csv
import dataclasses
import importlib
import json
import math
import os
import pathlib
from typing import Literal

import numpy as np

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.errors import UserError

_HELD_OUT = ('eval', 'dev', 'test', 'validation', 'valid')


@dataclasses.dataclass(frozen=True)
class Recording:
  """A recording and what is said in it.

  Attributes:
    name: the recording's name in messages.
    path: the audio file.
    text: the transcript.
    rate: samples per second that a manifest states; None if it states nothing.
  """

  name: str
  path: pathlib.Path
  text: str
  rate: int | None = None


def read(path: str | os.PathLike, stated: int | None = None):
  """Returns the samples float32 [T] of a file, and their rate per second.

  Channels are averaged. Raises UserError for a rate other than `stated`.
  """
  path = pathlib.Path(path).expanduser()
  if not path.is_file():
    raise paths.missing(path)
  samples_TC, rate = _read_wave(path) or _read_other(path)
  if not len(samples_TC) or not np.isfinite(samples_TC).all():
    what = 'samples that are no numbers' if len(samples_TC) else 'no samples'
    raise UserError(f'{path} holds {what}: leave it out, or record again.')
  if stated not in (None, rate):
    raise UserError(
      f'{path} has {rate} samples per second, and its manifest says {stated}:'
      ' correct one of them.'
    )
  return samples_TC.mean(axis=1, dtype=np.float32), rate


def _read_wave(path):
  """Returns samples_TC and rate of a WAV file; None if SciPy cannot read it."""
  from scipy.io import wavfile  # Imported here, since it takes long.

  try:
    rate, whole_T = wavfile.read(path)
  except Exception:  # For damaged headers SciPy raises many types.
    return None
  samples_TC = whole_T.astype(np.float32)
  if samples_TC.ndim == 1:
    samples_TC = samples_TC[:, None]
  if whole_T.dtype == np.uint8:  # Only 8-bit samples are unsigned.
    samples_TC = samples_TC / 128 - 1
  elif whole_T.dtype.kind == 'i':  # 24-bit samples are upper bits of int32.
    samples_TC /= 2 ** (8 * whole_T.itemsize - 1)
  return samples_TC, rate


def _read_other(path):
  """Returns samples_TC and rate of a file of any other format."""
  try:
    soundfile = importlib.import_module('soundfile')
  except ImportError as error:
    raise UserError(
      f'{path} is no WAV, or a damaged one, and other formats need soundfile:'
      ' pip install "mod_jax[speech]".'
    ) from error
  try:
    return soundfile.read(str(path), dtype='float32', always_2d=True)
  except soundfile.SoundFileError as error:
    raise UserError(
      f'{path} cannot be read as audio ({error}): repair it, or leave it out.'
    ) from error


def resample(samples_T: np.ndarray, rate: int, to: int) -> np.ndarray:
  """Returns the samples at the rate `to`; uses SciPy if soxr is missing."""
  if rate == to:
    return samples_T
  try:
    soxr = importlib.import_module('soxr')
  except ImportError:
    # Imported here, since it takes long and is rarely used.
    from scipy import signal

    common = math.gcd(rate, to)
    return signal.resample_poly(samples_T, to // common, rate // common).astype(
      np.float32
    )
  return soxr.resample(samples_T, rate, to)


def write(path: str | os.PathLike, samples_T: np.ndarray, rate: int) -> None:
  """Writes samples as a 16-bit WAV file; clips those outside of [-1, 1]."""
  from scipy.io import wavfile  # Imported here, since it takes long.

  whole_T = np.clip(np.round(np.asarray(samples_T) * 32767), -32768, 32767)
  wavfile.write(path, rate, whole_T.astype(np.int16))


def normalize(samples_T: np.ndarray) -> np.ndarray:
  """Returns the samples at mean 0 and variance 1, as Hugging Face does."""
  samples_T = samples_T - samples_T.mean()
  return np.float32(samples_T / np.sqrt(samples_T.var() + 1e-7))


def recordings(
  folder: str | os.PathLike, split: Literal['train', 'eval']
) -> list[Recording]:
  """Returns the recordings of a folder, in any of three layouts.

  * LibriSpeech: `*.trans.txt` of lines `ID TEXT` beside `ID.flac` or `ID.wav`;
  * Common Voice: `train.tsv` with the columns `path` and `sentence`, and files
    in `clips/`;
  * `train.jsonl` of objects with `audio`, a path, and `text`, and optionally
    `sampling_rate`.

  Recordings are held out if their `tsv` or `jsonl` has the name `eval`, `dev`,
  `test`, `validation` or `valid`, or if a top folder whose name begins so has
  their `*.trans.txt`. If there are none, every tenth recording is held out.
  """
  folder = pathlib.Path(folder).expanduser()
  if not folder.is_dir():
    raise paths.missing(folder)
  found = {'train': [], 'eval': []}
  for part, listed in _lists(folder):
    found[part] += listed
  if not found['train']:
    raise UserError(
      f'{folder} holds no train.jsonl, no train.tsv and no *.trans.txt with'
      ' recordings to train on: list them in one of these.'
    )
  if not found['eval']:
    everything = found['train']
    found = {'train': [], 'eval': everything[9::10] or everything[-1:]}
    held_out = {recording.name for recording in found['eval']}
    found['train'] = [x for x in everything if x.name not in held_out]
    if not found['train']:
      raise UserError(
        f'{folder} holds one recording, so that none can be held out: add some.'
      )
  return found[split]


def _lists(folder) -> Iterator[tuple[str, list[Recording]]]:
  """Yields ('train' or 'eval', recordings) for each list in a folder."""
  for part, stems in (('train', ('train',)), ('eval', _HELD_OUT)):
    for stem in stems:
      if (file := folder / f'{stem}.jsonl').is_file():
        yield part, [*_of_manifest(file)]
        break
      if (file := folder / f'{stem}.tsv').is_file():
        yield part, [*_of_table(file)]
        break
  for file in sorted(folder.rglob('*.trans.txt')):
    top = file.relative_to(folder).parts[0]
    part = 'eval' if top.startswith(_HELD_OUT) else 'train'
    yield part, [*_of_librispeech(file)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
  """The fields of a manifest's line."""

  audio: str
  text: str
  sampling_rate: config_lib.Size | None = None


def _lines(file) -> list[str]:
  try:
    # Not `splitlines`, which also cuts at characters such as U+2028 that may
    # be part of a text.
    return file.read_text('utf-8-sig').split('\n')
  except UnicodeDecodeError as error:
    raise UserError(f'{file} is not UTF-8 ({error}): save it so.') from error


def _of_manifest(file):
  for number, line in enumerate(_lines(file), 1):
    if not line.strip():
      continue
    where = f'{file}, line {number}'
    try:
      fields = json.loads(line)
    except ValueError as error:
      raise UserError(f'{where} is not JSON ({error}): correct it.') from error
    if not isinstance(fields, dict) or not {'audio', 'text'} <= fields.keys():
      raise UserError(f'{where}: expected an object with "audio" and "text".')
    known = config_lib.from_known(_Line, fields, where)
    yield Recording(
      known.audio, file.parent / known.audio, known.text, known.sampling_rate
    )


def _of_table(file):
  table = csv.DictReader(
    _lines(file), restval='', delimiter='\t', quoting=csv.QUOTE_NONE
  )
  if not {'path', 'sentence'} <= set(table.fieldnames or ()):
    raise UserError(f'{file}: expected the columns path and sentence.')
  for row in table:
    yield Recording(
      row['path'], file.parent / 'clips' / row['path'], row['sentence']
    )


def _of_librispeech(file):
  for line in _lines(file):
    name, _, text = line.partition(' ')
    flac, wav = (file.parent / f'{name}.{x}' for x in ('flac', 'wav'))
    if name:
      yield Recording(name, wav if wav.is_file() else flac, text)

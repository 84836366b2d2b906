"""Speech recognition by CTC."""

import dataclasses
import functools
import math
import pathlib

import jax.numpy as jnp
import numpy as np

from mod_jax import errors, flops, losses, viz
from mod_jax.data import audio, audio_files, characters
from mod_jax.data.characters import Characters
from mod_jax.layers import lora
from mod_jax.layers import stack as stack_lib
from mod_jax.losses.sums import Rows
from mod_jax.sampling import transcripts
from mod_jax.studies import speech as studies
from mod_jax.studies.devices import one_device
from mod_jax.tasks.modality import ROWS, Modality, table


class Speech(Modality):
  """Transcription of recordings."""

  example = 'AudioDataConfig(source="folder", path="recordings")'
  unit = 'frames'
  row = 'recordings'
  columns = ('wer', 'cer', 'loss')
  main = ('loss', 'wer', 'cer')
  rising = ()
  falling = ('loss', 'wer', 'cer', 'infeasible')
  # A dense checkpoint fits a routed model, and vice versa.
  optional = (r'(block_\d+/)?router/.*', lora.PARAMETERS)

  def __init__(self, config, workdir=None):
    """Keeps the config; reads no data.

    On first use, a vocabulary that was made of transcripts is read from
    `workdir`, or else from the run at `config.init`.
    """
    super().__init__(config, workdir)
    self._frames = config.model.frames
    self.length = (max(1, self._frames(config.data.samples[-1])),)

  @functools.cached_property
  def vocabulary(self) -> Characters:
    """The vocabulary of the data, read or made on first use."""
    file = self.kept(characters.VOCABULARY)
    if file is None or self.config.data.vocabulary:
      return audio.make_vocabulary(self.config.data)
    return Characters.read(file)

  # The cache keeps the task alive, which usually lives as long as the process.
  @functools.cache  # noqa: B019
  def split(self, name) -> audio.Recordings:
    return audio.Recordings(self.config.data, name, self.vocabulary)

  def check(self):
    size = self.config.model.vocab_size
    if size < len(self.vocabulary):
      raise errors.UserError(
        f"model.vocab_size={size} is smaller than the vocabulary's"
        f' {len(self.vocabulary)}: set it to at least that.'
      )

  def files(self):
    return {characters.VOCABULARY: self.vocabulary.to_json()}

  def endless(self, **kwargs):
    recordings = self.split('train')
    return audio.train_iterator(recordings, self._frames, **kwargs)

  def data_summary(self):
    return f'{super().data_summary()}, {len(self.vocabulary)} characters'

  def row_shapes(self):
    """Returns the shapes of a row of the longest bucket, by name.

    There are as many labels as frames: longer transcripts are infeasible. The
    rows of other buckets are smaller.
    """
    return {
      'wave': ((self.config.data.samples[-1],), 'float32'),
      'valid': (self.length, 'bool'),
      'labels': (self.length, 'int32'),
      'count': ((), 'int32'),
      'masked': (self.length, 'bool'),
    }

  def eval_batches(self, **kwargs):
    return audio.eval_batches(self.split('eval'), self._frames, **kwargs)

  @property
  def tokens_per_step(self):
    if len(self.config.data.buckets) > 1:
      return None
    return self.config.train.batch_size * self.length[0]

  def inputs(self, batch, *, train):
    masked = {'masked_BL': batch['masked']} if train else {}
    return (batch['wave'],), {'valid_BL': batch['valid'], **masked}

  def _losses(self, output, batch):
    return losses.ctc.loss(
      *(output.logits_BLV, batch['valid'], batch['labels'], batch['count']),
      blank=self.vocabulary.blank,
      weight_B=batch.get('weight'),
    )

  def loss(self, output, batch):
    return self._losses(output, batch)[0]

  def eval_sums(self, output, batch, mode):
    loss, infeasible = self._losses(output, batch)
    best_BL = output.logits_BLV.argmax(axis=-1)
    best_BL = jnp.where(batch['valid'], best_BL, self.vocabulary.blank)
    # Pad all buckets to one length, since their rows are concatenated.
    missing = self.length[0] - best_BL.shape[1]
    rows = {
      'best': jnp.pad(
        best_BL,
        ((0, 0), (0, missing)),
        constant_values=self.vocabulary.blank,
      ),
      **{name: batch[name] for name in ('labels', 'count', 'weight')},
    }
    return {'loss': loss, 'infeasible': infeasible, ROWS: Rows((rows,))}

  def of_rows(self, rows):
    """Returns word and character error rates of greedy decoding."""
    pairs = [
      (self.vocabulary.reference(labels[:count]), self.heard(best_L)[0])
      for best_L, labels, count in zip(
        *(rows[name] for name in ('best', 'labels', 'count')), strict=True
      )
    ]
    return losses.ctc.text_rates(pairs)

  def letters(self, best_L) -> list[tuple[str, int]]:
    """Returns the recognised letters and spaces, each with its first frame.

    `best_L` has the likeliest label of each frame.
    """
    labels, frames = transcripts.greedy(
      np.asarray(best_L), self.vocabulary.blank
    )
    heard = zip(map(self.vocabulary.letter, labels), frames, strict=True)
    return [(letter, frame) for letter, frame in heard if letter]

  def heard(self, best_L) -> tuple[str, list[tuple[str, int]]]:
    """Returns the text of `best_L`, and each word with its first frame."""
    words, fresh = [], True
    for letter, frame in self.letters(best_L):
      if letter == ' ':
        fresh = True
      elif fresh:
        words.append((letter, frame))
        fresh = False
      else:
        words[-1] = (words[-1][0] + letter, words[-1][1])
    return ' '.join(word for word, _ in words), words

  def token_weights(self, batch):
    return batch['valid'] * batch['weight'][:, None]

  # Reports.

  def summary(self, task, metrics):
    model = self.config.model
    macs = flops.forward(model, *self.length) / 2e9
    seconds = self.config.data.buckets[-1]
    rows = [('model', '', f'{macs / seconds:.4f}')]
    if 'never/loss' in metrics:
      rows.append(('never', 'never/'))
    return '\n'.join(
      table(metrics, self.columns, rows, more=('GMACs a second',))
    )

  def load_pictures(self, task, params, model_state):
    """Draws an adaptive model's compute over time above spectrograms."""

    def look(output, batch):
      choices = stack_lib.collect(output.aux, 'adaptive')
      best_BL = output.logits_BLV.argmax(axis=-1)
      return task.share_per_token(choices, best_BL.shape[1]), best_BL

    with one_device(params, model_state) as variables:
      batch, (share_BL, best_BL) = next(
        iter(task.over_held_out(look, *variables, 1))
      )
    shown = []
    real = np.flatnonzero(batch['weight'])
    for i in real[np.linspace(0, len(real) - 1, min(4, len(real)), dtype=int)]:
      frames = int(batch['valid'][i].sum())
      samples = self.config.model.samples(frames)
      said = self.vocabulary.decode(batch['labels'][i, : batch['count'][i]])
      shown.append(
        (
          *(batch['wave'][i, :samples], share_BL[i, :frames], said),
          self.letters(best_BL[i, :frames]),
        )
      )
    return {'load': self._load_over_time(shown)}

  def _load_over_time(self, shown):
    return viz.load_over_time(
      shown,
      rate=self.config.data.rate,
      unit='share of all learners',
      title='Where the compute goes in speech',
    )

  def studies(self):
    by_name = {'decoding': studies.decoding}
    if self.config.model.adaptive is not None:
      by_name['silence'] = studies.silence
    return by_name

  # Use.

  def transcribe(self, apply, recordings) -> list['Transcript']:
    """Returns the transcripts of audio files, whose paths are `recordings`.

    `apply` is the compiled model with its parameters. Raises UserError if a
    recording is shorter than a frame.
    """
    seconds = math.prod(self.config.model.conv_strides) / self.config.data.rate
    found = []
    for samples_T, frames in self._read(recordings):
      output = self._listen(apply, samples_T, frames)
      text, words = self.heard(_best(output, frames))
      words = tuple((word, frame * seconds) for word, frame in words)
      found.append(Transcript(text, words))
    return found

  def draw(self, task, apply, recordings):
    """Returns a figure of audio files: compute and letters over time.

    `apply` is the compiled model with its parameters. Raises UserError if the
    model is not adaptive.
    """
    if self.config.model.adaptive is None:
      raise errors.UserError(
        'draw: this model has no learners of which a frame could run fewer: use'
        ' run.predict.'
      )
    shown = []
    for path, (samples_T, frames) in zip(
      recordings, self._read(recordings), strict=True
    ):
      output = self._listen(apply, samples_T, frames)
      choices = stack_lib.collect(output.aux, 'adaptive')
      length = output.logits_BLV.shape[1]
      load_L = np.asarray(task.share_per_token(choices, length)[0, :frames])
      letters = self.letters(_best(output, frames))
      shown.append((samples_T, load_L, pathlib.Path(path).name, letters))
    return self._load_over_time(shown)

  def _read(self, recordings) -> list[tuple[np.ndarray, int]]:
    """Returns (samples, number of frames) of each file, normalised."""
    model, rate = self.config.model, self.config.data.rate
    prepared = []
    for path in recordings:
      samples_T = audio_files.resample(*audio_files.read(path), rate)
      frames = self._frames(len(samples_T))
      if frames < 1:
        raise errors.UserError(
          f'{path} has {len(samples_T)} samples, fewer than the'
          f' {model.samples(1)} of a frame: record for longer.'
        )
      prepared.append((audio_files.normalize(samples_T), frames))
    return prepared

  def _listen(self, apply, samples_T, frames):
    """Returns the model's output on a recording, which may be padded."""
    model = self.config.model
    length = len(samples_T)
    # Pad the frames to a power of two, so that few programs are compiled. The
    # variant `group` normalises over all frames, and padding would change that.
    if model.variant == 'layer':
      length = max(length, model.samples(1 << (frames - 1).bit_length()))
    wave_T = np.pad(samples_T, (0, length - len(samples_T)))
    valid_L = np.arange(self._frames(length)) < frames
    return apply(wave_T[None], valid_L[None])


def _best(output, frames):
  """Returns best_L, the likeliest label of each frame of the first row."""
  return np.asarray(output.logits_BLV[0, :frames].argmax(axis=-1))


@dataclasses.dataclass(frozen=True)
class Transcript:
  """What was recognised in a recording.

  Attributes:
    text: the transcript.
    words: each word and the second at which its first letter is recognised.
  """

  text: str
  words: tuple[tuple[str, float], ...]

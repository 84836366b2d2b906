"""Studies of a speech recogniser: its decoding, and its adaptive compute."""

import math

import jax
import numpy as np

from mod_jax.layers import stack as stack_lib
from mod_jax.losses import ctc
from mod_jax.sampling import transcripts
from mod_jax.train.task import Study

_WIDTHS = (4, 16)  # Numbers of prefixes in a beam.
# A frame is silent if its power is below this fraction of the mean power.
_SILENT = 0.01


def decoding(task, params, model_state) -> Study:
  """Compares error rates of greedy decoding and of prefix beam search."""
  modality = task.modality
  vocabulary = modality.vocabulary
  pairs = {}

  def look(output, batch):
    return jax.nn.log_softmax(output.logits_BLV)

  for batch, log_prob_BLV in task.over_held_out(look, params, model_state, 0):
    for i in np.flatnonzero(batch['weight']):
      log_prob_LV = log_prob_BLV[i, batch['valid'][i]]
      said = vocabulary.reference(batch['labels'][i, : batch['count'][i]])
      heard = {'greedy': modality.heard(log_prob_LV.argmax(axis=-1))[0]}
      for width in _WIDTHS:
        labels, _ = transcripts.prefix_beam(
          log_prob_LV, blank=vocabulary.blank, width=width
        )
        heard[f'beam of {width}'] = vocabulary.decode(labels)
      for name, text in heard.items():
        pairs.setdefault(name, []).append((said, text))
  metrics = {name: ctc.text_rates(x) for name, x in pairs.items()}
  lines = [f'{"":<12}{"wer":>10}{"cer":>10}']
  for name, rates in metrics.items():
    lines.append(f'{name:<12}{rates["wer"]:>10.4f}{rates["cer"]:>10.4f}')
  lines.append(
    f'{len(pairs["greedy"])} held-out recordings; beams have no language model.'
  )
  return Study(text='\n'.join(lines), metrics=metrics)


def silence(task, params, model_state) -> Study:
  """Measures how many learners run on frames of silence and of speech.

  A frame of the encoder is silent if the samples that the convolutions read for
  the frame have less than a hundredth of the recording's mean power. Only these
  samples count, although the transformer blocks also attend to other frames.
  """
  model = task.config.model
  num_learners = model.adaptive.num_learners
  silent, learners_of = [], {}

  def look(output, batch):
    choices = stack_lib.collect(output.aux, 'adaptive')
    parts = {'all modules': choices} | {
      name: {name: choice} for name, choice in choices.items()
    }
    return {
      name: task.share_per_token(part, batch['valid'].shape[1])
      for name, part in parts.items()
    }

  for batch, share_of in task.over_held_out(look, params, model_state, 0):
    for i in np.flatnonzero(batch['weight']):
      valid_L = batch['valid'][i]
      heard_LT = np.lib.stride_tricks.sliding_window_view(
        batch['wave'][i], model.samples(1)
      )[:: math.prod(model.conv_strides)]
      # The wave has a mean power of 1.
      power_L = np.square(heard_LT[: valid_L.sum()]).mean(axis=-1)
      silent.append(power_L < _SILENT)
      for name, share_BL in share_of.items():
        learners_L = num_learners * share_BL[i, valid_L]
        learners_of.setdefault(name, []).append(learners_L)
  silent = np.concatenate(silent)
  metrics, rows = {}, {}
  for part, chosen in (('silence', silent), ('speech', ~silent)):
    means = {
      name: np.concatenate(parts).mean(where=chosen).item()
      if chosen.any()
      else math.nan
      for name, parts in learners_of.items()
    }
    for name, mean in means.items():
      rows[name] = rows.get(name, f'{name:<16}') + f'{mean:>10.3f}'
    learners = means.pop('all modules')
    frames = int(chosen.sum())
    metrics[part] = {'frames': frames, 'learners': learners, 'modules': means}
  counts = ''.join(f'{part["frames"]:>10,}' for part in metrics.values())
  text = '\n'.join(
    (
      f'{"":<16}{"silence":>10}{"speech":>10}',
      f'{"frames":<16}{counts}',
      *rows.values(),
      f'Mean learners, of {num_learners}, of a frame in a module.',
    )
  )
  return Study(text=text, metrics=metrics)

"""Adaptive width in a recogniser of synthetic words: budgets and seeds.

    python benchmarks/speech_words.py --workdir=runs/speech_words

For each seed a dense Wav2Vec2 is trained (`configs/speech/words.py`) and
converted by its variant `acm`: learners and gates once, then end to end for
each budget. For comparison there are static models, whose modules all run the
same number of learners and which train end to end for as long. Error rates are
those of all held-out utterances, by greedy decoding; costs are those of a
second of audio, in utterances of three seconds. Each run is one line of
`speech_words.jsonl` beside this file; see `study.py`. The table and the picture
leave out the first two phases, the picture also models that lack one of the
dense model's seeds. Another picture has compute over time.
"""

import shutil
import sys

from absl import app, flags
import adaptive_runs
import machine
import speech_runs
from study import Study
import study_tables

from mod_jax import viz
from mod_jax.tasks.experiment import ExperimentConfig

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')
_STUDY = Study(__file__, 'runs/speech_words')

BUDGETS = (0.25, 0.4, 0.6, 0.75)
COUNTS = (1, 2, 3)
_SHOWN = 'adaptive, β = 0.4/0'  # Whose compute over time is a picture.


def planned(seed: int) -> dict[str, ExperimentConfig]:
  """Returns the runs of a seed, each after the one that it starts from."""
  words = machine.configs('speech/words.py')
  names = ('tiny', 'acm_tiny') if _STUDY.tiny else ('', 'acm')
  dense, acm = map(words.get_config, names)
  return speech_runs.planned(_STUDY, dense, acm, seed, BUDGETS, COUNTS)


def main(_):
  for seed in map(int, _SEEDS.value):
    _STUDY.train(planned(seed), speech_runs.tell(_STUDY))
  found = _STUDY.results()
  if not found:
    sys.exit('No run is finished yet.')
  print(study_tables.speech(found))
  figure = adaptive_runs.draw(
    found,
    cost=lambda result: 1e3 * result['gmacs_per_second'],
    accuracy=lambda result: 1 - result['wer'],
    title='Synthetic words: word accuracy (1 − WER) and compute',
    xlabel='millions of multiply-accumulates per second of audio',
  )
  viz.save(figure, _STUDY.path('.png'))
  load = _STUDY.workdir(_SHOWN) / 'pictures/load.png'
  if load.exists():
    shutil.copy(load, _STUDY.path('_load.png'))


if __name__ == '__main__':
  app.run(main)

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

import pathlib
import shutil
import sys

from absl import app, flags
import machine
import speech_runs
import study
import study_tables

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.tasks.experiment import ExperimentConfig

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')
_WORKDIR, _RUNS, _TABLE, _TINY = study.define_flags('runs/speech_words')

BUDGETS = (0.25, 0.4, 0.6, 0.75)
COUNTS = (1, 2, 3)
_SHOWN = 'adaptive, β = 0.4/0'  # Whose compute over time is a picture.


def planned(seed: int) -> dict[str, ExperimentConfig]:
  """Returns the runs of a seed, each after the one that it starts from."""
  root = pathlib.Path(__file__).resolve().parents[1] / 'configs'
  words = config_lib.load(root / 'speech/words.py')
  names = ('tiny', 'acm_tiny') if _TINY.value else ('', 'acm')
  return speech_runs.planned(
    *(seed, *map(words.get_config, names), _WORKDIR.value),
    budgets=BUDGETS,
    counts=COUNTS,
  )


def result_path(suffix: str) -> pathlib.Path:
  trial = _WORKDIR.value if _TINY.value else None
  return machine.result_path(__file__, suffix, trial)


def draw(found: dict[str, dict]):
  """Returns a picture of the share of words recognised over compute."""
  models = study_tables.by_model(found)
  points = [
    machine.point(
      name,
      name.split(',')[0],
      1e3 * machine.spread([x['gmacs_per_second'] for x in runs])['mean'],
      machine.spread([1 - run['wer'] for run in runs]),
    )
    for name, of_seed in models.items()
    if name not in study_tables.FIRST_PHASES
    and len(runs := list(of_seed.values())) == len(models['dense'])
  ]
  return viz.accuracy_flops(
    points,
    title='Synthetic words: word accuracy (1 − WER) and compute',
    xlabel='millions of multiply-accumulates per second of audio',
    pareto=True,
  )


def main(_):
  if not _TABLE.value:
    for seed in map(int, _SEEDS.value):
      study.train_all(
        *(planned(seed), _RUNS.value, _WORKDIR.value),
        *(result_path('.jsonl'), speech_runs.tell(_WORKDIR.value)),
      )
  found = study.read(result_path('.jsonl'))
  if not found:
    sys.exit('No run is finished yet.')
  print(study_tables.speech(found))
  viz.save(draw(found), result_path('.png'))
  load = study.workdir(_WORKDIR.value, _SHOWN) / 'pictures/load.png'
  if load.exists():
    shutil.copy(load, result_path('_load.png'))


if __name__ == '__main__':
  app.run(main)

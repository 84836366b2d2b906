"""Adaptive width in a recogniser of synthetic words: budgets and seeds.

    python benchmarks/speech_words.py --workdir=runs/speech_words

For each seed a dense Wav2Vec2 is trained (`configs/speech/words.py`) and
converted by its variant `acm`: learners and gates once, then end to end for
each budget. For comparison there are static models, whose modules all run the
same number of learners and which train end to end for as long. Error rates are
those of all held-out utterances, by greedy decoding; costs are those of a
second of audio, in utterances of three seconds. Each run is one line of
`speech_words.jsonl` beside this file; see `study.py`. The table has all runs,
the picture the models that have as many seeds as the dense one.
"""

import pathlib
import sys

from absl import app, flags
import machine
import study
import study_tables

import mod_jax
from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.studies import speech as studies
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')
_WORKDIR, _RUNS, _TABLE, _TINY = study.define_flags('runs/speech_words')

BUDGETS = (0.25, 0.4, 0.6, 0.75)
COUNTS = (1, 2, 3)


def planned(seed: int) -> dict[str, ExperimentConfig]:
  """Returns the runs of a seed, each after the one that it starts from."""
  root = pathlib.Path(__file__).resolve().parents[1] / 'configs'
  words = config_lib.load(root / 'speech/words.py')
  dense, acm = ('tiny', 'acm_tiny') if _TINY.value else ('', 'acm')
  common = {'seed': seed, 'log.tensorboard': False, 'evaluation.every': 0}

  def run(variant, init=None, **objective):
    changes = {f'objective.{name}': x for name, x in objective.items()}
    if init:
      path = study.workdir(_WORKDIR.value, f'{init}/{seed}').absolute()
      changes['init'] = str(path)
    return config_lib.replace(words.get_config(variant), {**common, **changes})

  runs = {
    'dense': run(dense),
    'learners': run(acm, 'dense', phase='learners'),
    'gates': run(acm, 'learners', phase='gates'),
  }
  for budget in BUDGETS:
    runs[f'adaptive, β = {budget}'] = run(
      acm, 'gates', phase='end_to_end', budget=budget
    )
  for k in COUNTS:
    runs[f'static, k = {k}'] = run(
      *(acm, 'learners'),
      **{'phase': 'end_to_end', 'static_learners': k, 'gates.num_steps': 0},
    )
  names = {name: f'{name}/{seed}' for name in runs}
  return {
    names[name]: config_lib.replace(config, {'name': names[name]})
    for name, config in runs.items()
  }


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  task, prefix, told = make_task(config), '', {}
  if config.objective is None:
    macs = flops.published_macs(config.model, *task.modality.length)
  elif 'load' in metrics:
    macs = task.macs(metrics['load'])
    trained = mod_jax.load(study.workdir(_WORKDIR.value, config.name))
    params, state = trained.variables['params'], {}
    found = studies.silence(trained.task, params, state, None).metrics
    names = ('load', 'load_std', 'token_std', 'budget_error')
    told |= {
      **{name: metrics[name] for name in names},
      **{name: part['learners'] for name, part in found.items()},
    }
  else:
    # Learners alone: all of them.
    k = config.objective.static_learners or task.num_learners
    macs, prefix = task.macs(learners=k), f'k{k}/'
  return {
    **{name: metrics[prefix + name] for name in ('wer', 'cer', 'loss')},
    'gmacs_per_second': macs / 1e9 / config.data.buckets[-1],
    **told,
  }


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
    # The other phases are no end.
    if name not in ('learners', 'gates')
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
        *(result_path('.jsonl'), tell),
      )
  found = study.read(result_path('.jsonl'))
  if not found:
    sys.exit('No run is finished yet.')
  print(study_tables.speech(found))
  viz.save(draw(found), result_path('.png'))


if __name__ == '__main__':
  app.run(main)

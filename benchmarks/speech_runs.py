"""Runs of studies that convert recognisers of speech, and their results."""

from collections.abc import Sequence

import study

import mod_jax
from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.studies import speech as studies
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig


def planned(
  seed: int,
  dense: ExperimentConfig,
  acm: ExperimentConfig,
  root: str,
  *,
  budgets: Sequence[float],
  counts: Sequence[int] = (),
) -> dict[str, ExperimentConfig]:
  """Returns the runs of a seed, each after the one that it starts from.

  Args:
    seed: of all of them.
    dense: how the dense model is trained.
    acm: how it is converted.
    root: directory of the runs.
    budgets: of the adaptive models.
    counts: learners of the static ones.
  """
  common = {'seed': seed, 'log.tensorboard': False, 'evaluation.every': 0}

  def run(config, init=None, **objective):
    changes = {f'objective.{name}': x for name, x in objective.items()}
    if init:
      changes['init'] = str(study.workdir(root, f'{init}/{seed}').absolute())
    return config_lib.replace(config, {**common, **changes})

  runs = {
    'dense': run(dense),
    'learners': run(acm, 'dense', phase='learners'),
    'gates': run(acm, 'learners', phase='gates'),
  }
  for budget in budgets:
    runs[f'adaptive, β = {budget}'] = run(
      acm, 'gates', phase='end_to_end', budget=budget
    )
  for k in counts:
    runs[f'static, k = {k}'] = run(
      *(acm, 'learners'),
      **{'phase': 'end_to_end', 'static_learners': k, 'gates.num_steps': 0},
    )
  return {
    f'{name}/{seed}': config_lib.replace(config, {'name': f'{name}/{seed}'})
    for name, config in runs.items()
  }


def tell(root: str):
  """Returns a function that returns a run's result, for `study.train_all`.

  Costs are those of a second of audio, in recordings of the longest bucket.
  """

  def told(config: ExperimentConfig, metrics: dict) -> dict:
    task, prefix, more = make_task(config), '', {}
    if config.objective is None:
      macs = flops.published_macs(config.model, *task.modality.length)
    elif 'load' in metrics:
      macs = task.macs(metrics['load'])
      trained = mod_jax.load(study.workdir(root, config.name))
      params, state = trained.variables['params'], {}
      found = studies.silence(trained.task, params, state, None).metrics
      names = ('load', 'load_std', 'token_std', 'budget_error')
      more |= {
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
      **more,
    }

  return told

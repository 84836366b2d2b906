"""Runs of studies that convert recognisers of speech, and their results."""

import adaptive_runs
from study import Study

import mod_jax
from mod_jax import flops
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig


def planned(
  study: Study,
  dense: ExperimentConfig,
  acm: ExperimentConfig,
  seed: int,
  *parts,
) -> dict[str, ExperimentConfig]:
  """Returns the runs of a seed, each after the one that it starts from.

  Args:
    study: the study.
    dense: how the dense model is trained.
    acm: how it is converted.
    seed: of all of them.
    *parts: budgets and numbers of learners, as of `adaptive_runs.planned`.
  """
  runs = {f'dense/{seed}': adaptive_runs.run(study, dense, seed)}
  return runs | adaptive_runs.planned(study, acm, seed, *parts)


def tell(study: Study):
  """Returns a function that returns a run's result, for `Study.train`.

  Costs are those of a second of audio, in recordings of the longest bucket.
  """

  def told(config: ExperimentConfig, metrics: dict) -> dict:
    task, prefix, more = make_task(config), '', {}
    if config.objective is None:
      macs = flops.published_macs(config.model, *task.modality.length)
    elif 'load' in metrics:
      macs = task.macs(metrics['load'])
      trained = mod_jax.load(study.workdir(config.name))
      params, state = trained.variables['params'], {}
      silence = trained.task.studies()['silence']
      found = silence(params, state, None).metrics
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

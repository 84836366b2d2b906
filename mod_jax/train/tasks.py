"""The explicit table of tasks, by the config of the model that they train."""

from mod_jax.models.lm import LMConfig
from mod_jax.train.experiment import ExperimentConfig
from mod_jax.train.language import LanguageTask
from mod_jax.train.task import Task

_TASKS = {LMConfig: LanguageTask}


def make_task(config: ExperimentConfig) -> Task:
  """Returns the task that an experiment describes."""
  return _TASKS[type(config.model)](config)

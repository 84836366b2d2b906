"""Tasks: a modality and a training method, chosen by the experiment."""

from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks.adaptive import Adaptive
from mod_jax.tasks.distilled import Distilled
from mod_jax.tasks.experiment import ConversionObjective, ExperimentConfig
from mod_jax.tasks.images import Images
from mod_jax.tasks.language import Language
from mod_jax.tasks.plain import Plain
from mod_jax.tasks.pruning import Pruning
from mod_jax.train import evaluation
from mod_jax.train.task import Task


def make_task(config: ExperimentConfig, workdir=None) -> Task:
  """Returns the task that an experiment describes.

  Args:
    config: the experiment.
    workdir: directory of its run, which may hold `Task.files` already; None for
      a task without a run.
  """
  if isinstance(config.model, LMConfig):
    modality = Language(config, workdir)
  else:
    modality = Images(config)
  # Adaptive modules are trained last, from a pruned or routed model.
  if config.model.adaptive is not None:
    method = Adaptive
  elif isinstance(config.model, DynamicViTConfig):
    method = Pruning
  elif isinstance(config.objective, ConversionObjective):
    method = Distilled
  else:
    method = Plain
  return method(config, modality)


def load(workdir, *, step: int | None = None) -> evaluation.Trained:
  """Returns the task and the parameters of a run; changes nothing on disk.

  Args:
    workdir: the run's directory.
    step: the checkpoint to read; the newest usable one by default.

  Raises:
    UserError: there is no run, or no such checkpoint, or it does not fit the
      run's config.
  """
  config = workdir_lib.read_config(workdir, ExperimentConfig)
  return evaluation.load(make_task(config, workdir), workdir, step=step)

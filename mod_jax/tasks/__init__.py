"""Tasks: a modality and a training method, chosen by the experiment.

* `experiment`: the config of a run, and the settings of its method;
* `phases`: experiments of several runs, each started from the one before;
* `plain`: the method that `adaptive`, `distilled` and `pruning` extend;
* `modality`: the interface of `language`, `images`, `detection`, `speech` and
  `vision_language`; `vision`: what `images` and `detection` share;
* `warm_start`: initial weights from another run or from published files;
* `expert_pictures`: data for the pictures of experts.
"""

from mod_jax.models.detr import DETRConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.runs import best
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks.adaptive import Adaptive
from mod_jax.tasks.detection import Detection
from mod_jax.tasks.distilled import Distilled
from mod_jax.tasks.experiment import ConversionObjective, ExperimentConfig
from mod_jax.tasks.images import Images
from mod_jax.tasks.language import Language
from mod_jax.tasks.plain import Plain
from mod_jax.tasks.pruning import Pruning
from mod_jax.tasks.speech import Speech
from mod_jax.tasks.vision_language import VisionLanguage
from mod_jax.train import evaluation

# What models read, by class of their configs.
MODALITIES = {
  LMConfig: Language,
  ViTConfig: Images,
  DynamicViTConfig: Images,
  DETRConfig: Detection,
  Wav2Vec2Config: Speech,
  VLMConfig: VisionLanguage,
}


def make_task(config: ExperimentConfig, workdir=None) -> Plain:
  """Returns the task that an experiment describes.

  `workdir` is the directory of the task's run, or None without a run. Files of
  `Data.files`, such as a tokenizer, are read from there if they exist.
  """
  modality = MODALITIES[type(config.model)](config, workdir)
  # Test this first: a pruned or routed model may have adaptive modules, too,
  # and these are trained after it.
  if config.model.adaptive is not None:
    method = Adaptive
  elif isinstance(config.model, DynamicViTConfig):
    method = Pruning
  elif isinstance(config.objective, ConversionObjective):
    method = Distilled
  else:
    method = Plain
  return method(config, modality)


def load(workdir, *, step: best.Step = None) -> evaluation.Trained:
  """Reads the task and the parameters of a run; changes nothing on disk.

  `step` is the step of the checkpoint, or 'best' for the step in `best.json`;
  None loads the newest usable checkpoint.

  Raises:
    UserError: there is no run, or no such checkpoint, or it does not fit the
      run's config.
  """
  config = workdir_lib.read_config(workdir, ExperimentConfig)
  return evaluation.load(make_task(config, workdir), workdir, step=step)

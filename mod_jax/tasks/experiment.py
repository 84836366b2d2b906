"""The complete config of a run, as built by `configs/*.py`."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Annotated, Any, Literal

from mod_jax import config as config_lib
from mod_jax import errors
from mod_jax.data.audio import AudioDataConfig
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.data.detection import DetectionDataConfig
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.text import TextDataConfig
from mod_jax.models.detr import DETRConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.runs.run_config import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningObjective(config_lib.Validated):
  """Loss weights of the training of a DynamicViT, and its teacher.

  The losses are those of Rao et al. 2021, section 3.4, Eq. 16 as published. The
  ratio loss applies only to the scores `predicted` and `static`, with which
  training masks patches. The two distillation losses need a teacher: the
  backbone, trained without dropping patches.
  """

  classification: config_lib.Weight = 1.0  # Loss weight of the cross-entropy.
  # Loss weight of the squared error of the fractions of patches kept.
  ratio: config_lib.Weight = 2.0
  # Loss weight of the squared distance to the teacher's features, on kept
  # tokens. The score `structural` does not use it.
  token_distillation: config_lib.Weight = 0.5
  # Loss weight of the divergence from the teacher's predictions.
  logit_distillation: config_lib.Weight = 0.5
  # Workdir or checkpoint with the teacher's weights; None = `init`.
  teacher: str | None = None

  @property
  def needs_teacher(self) -> bool:
    return self.token_distillation > 0 or self.logit_distillation > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseConfig:
  """Settings of one phase (see `phases`), in place of the experiment's."""

  num_steps: config_lib.Count  # Steps of the phase; 0 skips it.
  batch_size: config_lib.Size  # Rows of a step.
  # Peak learning rate. In the phases of an adaptive model it falls to 1e-6.
  # Momentum, weight decay and clipping are those of `optimizer`.
  learning_rate: config_lib.Positive
  # The rate rises linearly from 0 over this many steps, or over this fraction
  # of the phase's steps.
  warmup_steps: config_lib.Steps = 0

  def __post_init__(self):
    config_lib.validate(self)
    if self.num_steps and self.warmup_steps >= self.num_steps:
      raise errors.UserError(
        f'warmup_steps={self.warmup_steps} leaves nothing of a phase of'
        f' {self.num_steps} steps: shorten the warm-up or lengthen the phase.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ACMObjective(config_lib.Validated):
  """How a model becomes an adaptive one: Wójcik et al. 2023, section 3.

  There are three phases, each a run of its own. `learners` imitate the modules
  that they replace; `gates` learn from labels how many learners a token needs;
  `end_to_end` trains the whole model on the task, and holds it to the budget.
  """

  # The phase to train, or all in turn.
  phase: Literal['all', 'learners', 'gates', 'end_to_end'] = 'all'
  # β: fraction of the cost of all learners that tokens should use on average.
  budget: config_lib.Proper = 0.5
  # τ: one more learner is worth its cost if it divides the error by at least τ.
  tau: Annotated[float, config_lib.Range(gt=1)] = 1.2
  budget_weight: config_lib.Weight = 0.1  # α_b: loss weight of the budget.
  # α_e: loss weight of the entropy.
  entropy_weight: config_lib.Weight = 0.05
  # α_d: loss weight of the diversity.
  diversity_weight: config_lib.Weight = 0.05
  # Factor on the learning rate of the gates in `end_to_end`; 1 in the paper.
  # Short runs need more: Adam moves a parameter of a gate by about the learning
  # rate per step, at most.
  gate_rate: config_lib.Weight = 1.0
  # Fraction of the steps of `end_to_end` in which gates sample their choices; 1
  # in the paper. Later steps take the likeliest choice, as inference does, so
  # that inference meets the budget, too.
  noise_until: config_lib.Probability = 1.0
  # Number of learners that every token runs in `end_to_end`; 0 = the gates
  # choose. For comparison with a static model of equal cost.
  static_learners: config_lib.Count = 0
  # Path of the weights of the model without adaptive modules, which teaches in
  # the first two phases. None = `init` or, if that is an adaptive run, the
  # teacher of that run.
  teacher: str | None = None
  learners: PhaseConfig = PhaseConfig(
    num_steps=2000, batch_size=64, learning_rate=1e-3
  )
  gates: PhaseConfig = PhaseConfig(
    num_steps=1000, batch_size=64, learning_rate=1e-2
  )
  end_to_end: PhaseConfig = PhaseConfig(
    num_steps=10_000, batch_size=512, learning_rate=1e-4
  )

  @property
  def phases(self) -> dict[str, PhaseConfig]:
    """The config of each phase, by name, in order, without skipped phases."""
    names = ('learners', 'gates', 'end_to_end')
    named = {name: getattr(self, name) for name in names}
    return {name: phase for name, phase in named.items() if phase.num_steps}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionObjective(config_lib.Validated):
  """Distils a dense language model into the routed model that is made of it.

  The divergence from the dense model's predictions is added to the loss. Hence
  each step also takes a forward pass of the dense model, and holds all logits
  at once, which needs more memory.
  """

  # Loss weight of the divergence from the dense model's predictions.
  distillation: config_lib.Positive = 1.0
  # Workdir or checkpoint with the dense model's weights; None = `init`.
  teacher: str | None = None


# Class of the data config, by class of the model's config.
_DATA = {
  LMConfig: TextDataConfig,
  ViTConfig: ImageDataConfig,
  DynamicViTConfig: ImageDataConfig,
  DETRConfig: DetectionDataConfig,
  Wav2Vec2Config: AudioDataConfig,
  VLMConfig: ConversationDataConfig,
}


_PICTURES = (ImageDataConfig, DetectionDataConfig, ConversationDataConfig)


def _within(model) -> str:
  """Returns what precedes `image_size` in a model's config, as 'backbone.'."""
  if isinstance(model, VLMConfig):
    return f'tower.{_within(model.tower)}'
  return 'backbone.' if isinstance(model, DynamicViTConfig) else ''


def _objective_of(model) -> type | None:
  """Returns the class that a model's objective must have; None for no class."""
  # Test this first: a pruned or routed model may have adaptive modules, too,
  # and these are trained after it.
  if model.adaptive is not None:
    return ACMObjective
  if isinstance(model, DynamicViTConfig):
    return PruningObjective
  if isinstance(model, LMConfig) and model.routing is not None:
    return ConversionObjective
  return None


def _parts(model) -> list[str]:
  """Returns which fields set conditional computation, as 'model.routing'."""
  inner, parts = 'model.', []
  if isinstance(model, DynamicViTConfig):
    inner, parts = 'model.backbone.', ['model.stages']
  elif isinstance(model, VLMConfig):
    inner = 'model.language.'
  return parts + [
    inner + name
    for name in ('reduction', 'routing', 'adaptive')
    if getattr(model, name, None) is not None
  ]


ModelConfig = (
  LMConfig
  | ViTConfig
  | DynamicViTConfig
  | DETRConfig
  | Wav2Vec2Config
  | VLMConfig
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(RunConfig):
  """The config of a run; `config.json` in the run's directory holds it."""

  # A language model, a vision transformer (dense, routed or pruned), a
  # detector, a speech recogniser, or a vision-language model.
  model: ModelConfig = LMConfig()
  # The data, which must fit the model.
  data: (
    TextDataConfig
    | ImageDataConfig
    | DetectionDataConfig
    | AudioDataConfig
    | ConversationDataConfig
  ) = TextDataConfig()
  # Settings of the training of a pruned or adaptive model; None = the defaults.
  # For a routed language model: ConversionObjective distils from the dense
  # model, None does not.
  objective: PruningObjective | ACMObjective | ConversionObjective | None = None
  # If set, the dense model is trained first, from `init`, as a separate run in
  # WORKDIR/phase_dense, and this run starts from its weights.
  dense: PhaseConfig | None = None

  def __post_init__(self):
    super().__post_init__()
    for problem in self._problems():
      raise errors.UserError(problem)

  def implied(self, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the further fields that `config.replace` sets beside `changes`.

    The model and the data each have a field `image_size`: if `changes` has only
    one of the two fields, the other one gets the same value.
    """
    if not isinstance(self.data, _PICTURES):
      return {}
    inner = _within(self.model)
    sizes = {f'model.{inner}image_size', 'data.image_size'}
    given = sizes & changes.keys()
    # A model or data config that is replaced as a whole sets its own size.
    if len(given) != 1 or changes.keys() & {
      *('model', 'model.backbone', 'model.tower', 'model.tower.backbone'),
      'data',
    }:
      return {}
    return dict.fromkeys(sizes - given, changes[given.pop()])

  def _problems(self) -> Iterator[str]:
    """Yields an error message for each pair of fields that do not fit."""
    model, data, objective = self.model, self.data, self.objective
    kind, adaptive, parts = type(model).__name__, model.adaptive, _parts(model)
    data_class, expected = _DATA[type(model)], _objective_of(model)
    if not isinstance(data, data_class):
      yield (
        f'data={type(data).__name__} and model={kind}: this model needs the'
        f' data of {data_class.__name__}, so change one of them.'
      )
    if objective is not None and type(objective) is not expected:
      way_out = 'None' if expected is None else f'{expected.__name__} or None'
      yield (
        f'objective={type(objective).__name__} and model={kind}: this model'
        f' needs objective={way_out}.'
      )
    if self.dense is not None and model == model.dense_twin():
      yield 'dense and model: this model is dense itself, so set dense to None.'
    if self.dense is not None and len(parts) > 1:
      yield (
        f'dense and {" and ".join(parts)}: each of these is trained by a run of'
        ' its own, from the last; set dense to None, and give the run before'
        ' as init.'
      )
    if isinstance(objective, ACMObjective):
      if self.train.num_epochs is not None:
        yield (
          f'train.num_epochs={self.train.num_epochs} and objective='
          'ACMObjective: each phase has steps of its own, so leave the epochs'
          ' out.'
        )
      if objective.static_learners > adaptive.num_learners:
        yield (
          f'objective.static_learners={objective.static_learners}: expected at'
          f' most model.adaptive.num_learners={adaptive.num_learners}.'
        )
    frozen = self.train.frozen
    # Each phase of an adaptive model sets its own rules (`phases._rules`), and
    # some phases freeze nothing.
    if frozen and adaptive is None and all(r[1] for r in self.optimizer.rules):
      yield (
        f'train.frozen={frozen} and optimizer.rules: no rule freezes anything'
        ' for ever; give one a factor of 0, or set frozen to None.'
      )
    if isinstance(data, _PICTURES) and model.image_size != data.image_size:
      inner = _within(model)
      yield (
        f'model.{inner}image_size={model.image_size} and data.image_size='
        f'{data.image_size}: a model takes images of one size, so set both to'
        ' the same.'
      )
    if isinstance(model, VLMConfig) and adaptive is not None:
      yield (
        'model.language.adaptive and model=VLMConfig: no phase trains learners'
        ' in a model that reads pictures, so set adaptive to None.'
      )
    kinds = model.routing and model.routing.kinds
    if isinstance(model, LMConfig) and kinds is not None:
      yield (
        f'model.routing.kinds={kinds} and model=LMConfig: only the tokens of'
        ' text with pictures (VLMConfig) have kinds, so leave kinds out.'
      )
    taught = objective or PruningObjective()
    if (
      expected is PruningObjective
      and data.multi_label
      and taught.logit_distillation
    ):
      yield (
        f'objective.logit_distillation={taught.logit_distillation} and'
        ' data.label_table: the divergence is of classes of which one is true;'
        ' set it to 0.'
      )
    if isinstance(objective, ConversionObjective) and model.early_exit:
      yield (
        f'model.early_exit={model.early_exit} and objective='
        'ConversionObjective: an early exit learns from the next token alone,'
        ' so set one of them to 0 or None.'
      )
    steps = self.train.capacity_warmup_steps
    if steps and model.routing is None:
      yield (
        f'train.capacity_warmup_steps={steps} and model={kind} without routing:'
        ' there is no capacity to come down, so set the steps to 0, or route'
        ' some blocks.'
      )
    if steps and len(parts) > 1:
      yield (
        f'train.capacity_warmup_steps={steps} and {" and ".join(parts)}: the'
        ' capacity comes down in a run that trains the routed model alone, from'
        ' which this one starts; set the steps to 0.'
      )

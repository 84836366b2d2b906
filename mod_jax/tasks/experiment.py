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
  """The weights of DynamicViT's losses.

  Rao et al. 2021, section 3.4, Eq. 16 as published. The ratio loss only applies
  if training masks patches: with the scores `predicted` and `static`. The
  distillations need a teacher: the backbone, trained without dropping.
  """

  classification: config_lib.Weight = 1.0  # Weight of the cross-entropy.
  # Weight of the squared error of the fractions of patches kept.
  ratio: config_lib.Weight = 2.0
  # Weight of the squared distance to the teacher's features, on kept tokens.
  token_distillation: config_lib.Weight = 0.5
  # Weight of the divergence from the teacher's predictions.
  logit_distillation: config_lib.Weight = 0.5
  teacher: str | None = None  # A run or checkpoint; None = that of `init`.

  @property
  def needs_teacher(self) -> bool:
    return self.token_distillation > 0 or self.logit_distillation > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseConfig:
  """One phase of a run: settings that replace those of the run."""

  num_steps: config_lib.Count  # 0 skips the phase.
  batch_size: config_lib.Size  # Rows of a step.
  # Peak learning rate; with learners it falls to 1e-6. The other settings are
  # those of the optimiser.
  learning_rate: config_lib.Positive
  # The rate rises linearly from 0 over this many steps, or a fraction of all.
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

  Three phases, each a run of its own: `learners` imitate the modules that they
  replace; `gates` learn from labels how many learners a token needs;
  `end_to_end` trains everything for the task at the budget.
  """

  # The phase to train, or all in turn.
  phase: Literal['all', 'learners', 'gates', 'end_to_end'] = 'all'
  budget: config_lib.Proper = 0.5  # β: mean share of all learners' cost.
  # τ: a further learner is worth it if it divides the error by this.
  tau: Annotated[float, config_lib.Range(gt=1)] = 1.2
  budget_weight: config_lib.Weight = 0.1  # α_b: weight of the budget loss.
  # α_e: weight of the entropy loss.
  entropy_weight: config_lib.Weight = 0.05
  # α_d: weight of the diversity loss.
  diversity_weight: config_lib.Weight = 0.05
  # Factor on the learning rate of the gates, end to end; 1 in the paper. Short
  # runs need more: gates move at most by the rate times the number of steps.
  gate_rate: config_lib.Weight = 1.0
  # Fraction of the end-to-end steps in which gates sample; 1 in the paper.
  # Later steps take the most likely choice, as inference does, which then meets
  # the budget.
  noise_until: config_lib.Probability = 1.0
  # Learners that every token runs, end to end; 0 = as the gates choose. This is
  # a control: a static model of the same cost.
  static_learners: config_lib.Count = 0
  # Weights of the model without adaptive modules, which the first two phases
  # learn from; None = those at `init`, or the teacher of an adaptive run there.
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
    """The phases in order, by name, without those skipped."""
    names = ('learners', 'gates', 'end_to_end')
    named = {name: getattr(self, name) for name in names}
    return {name: phase for name, phase in named.items() if phase.num_steps}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionObjective(config_lib.Validated):
  """Distillation of a dense language model into the routed one made of it.

  The divergence from the dense model's predictions is added to the loss. Each
  step takes a forward pass of the dense model, and holds all logits at once,
  which needs more memory.
  """

  # Weight of the divergence from the dense model's predictions.
  distillation: config_lib.Positive = 1.0
  teacher: str | None = None  # A run or checkpoint; None = that of `init`.


# The data of each kind of model.
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
  """Returns the prefix of the fields of the vision transformer."""
  if isinstance(model, VLMConfig):
    return f'tower.{_within(model.tower)}'
  return 'backbone.' if isinstance(model, DynamicViTConfig) else ''


def _objective_of(model) -> type | None:
  """Returns the kind of objective that a model may have; None for none."""
  # Adaptive modules are trained last, so their objective comes first.
  if model.adaptive is not None:
    return ACMObjective
  if isinstance(model, DynamicViTConfig):
    return PruningObjective
  if isinstance(model, LMConfig) and model.routing is not None:
    return ConversionObjective
  return None


def _parts(model) -> list[str]:
  """Returns the fields of conditional computation in use, outermost first."""
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
  """One run. Saved as `config.json` beside its checkpoints."""

  # A language model, a vision transformer, a detector, a recogniser of speech,
  # or a language model that sees.
  model: ModelConfig = LMConfig()
  # The data, which must fit the model.
  data: (
    TextDataConfig
    | ImageDataConfig
    | DetectionDataConfig
    | AudioDataConfig
    | ConversationDataConfig
  ) = TextDataConfig()
  # Settings of the objective, for models that have some; None = defaults.
  objective: PruningObjective | ACMObjective | ConversionObjective | None = None
  # Trains the dense model first, from `init`, as a separate run in
  # WORKDIR/phase_dense, from which this run then starts. None = does not.
  dense: PhaseConfig | None = None

  def __post_init__(self):
    super().__post_init__()
    for problem in self._problems():
      raise errors.UserError(problem)

  def implied(self, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that `config.replace` changes with those given.

    A model takes pictures of one size: either of its two fields sets both.
    """
    if not isinstance(self.data, _PICTURES):
      return {}
    inner = _within(self.model)
    sizes = {f'model.{inner}image_size', 'data.image_size'}
    given = sizes & changes.keys()
    # Parts that are replaced as a whole bring their own.
    if len(given) != 1 or changes.keys() & {
      *('model', 'model.backbone', 'model.tower', 'model.tower.backbone'),
      'data',
    }:
      return {}
    return dict.fromkeys(sizes - given, changes[given.pop()])

  def _problems(self) -> Iterator[str]:
    """Yields what does not fit between the parts."""
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
    # Learners bring rules of their own, some of which freeze nothing.
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

"""The optimiser, its learning rate over a run, and rules for parameters.

Parameters are selected by name, such as `block_0/mlp/up/kernel`. `scale_of`
returns a parameter's factor on the learning rate and its first step.
"""

from collections.abc import Iterable
import dataclasses
import difflib
import re
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mod_jax import config as config_lib
from mod_jax import errors, trees

_BLOCK = re.compile(r'(?:^|/)block_(\d+)(?:/|$)')
# Names of parameters before the blocks. Other parameters without a block's
# number come after the blocks.
_STEM = re.compile(
  r'(?:^|/)(?:patch|position|(?:class|distillation)_token|embedding|stem'
  r'|input_norm/'
  # Names in a speech recogniser.
  r'|conv_(?:norm_)?\d+/|feature_norm/|project/|mask_embedding)'
)
# Parameters with weight decay: matrices, including those of learners and hidden
# layers. Norms, biases and routers, which are vectors, do not decay.
_MATRICES = ('kernel', 'embedding', 'hidden_kernel', 'up', 'down')
# Blocks stacked by `nn.scan`: one name stands for several blocks.
_STACKED = re.compile(r'(?:^|/)layers/block_\d+/')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """The optimiser, its learning rate, and which parameters are trained.

  `rules` are triples: a regular expression that is searched for in a
  parameter's name, a factor on the parameter's learning rate, and the first
  step at which the parameter is trained. Steps count from 0; a fraction is the
  part of all steps before the first. The first rule that matches applies. If
  there are rules, every parameter must match one (`check_rules`). A factor of 0
  freezes a parameter permanently: not even weight decay changes it.
  """

  kind: Literal['adamw', 'sgd'] = 'adamw'  # The algorithm.
  learning_rate: config_lib.Positive = 3e-3  # Peak, after the warm-up.
  # The rate rises linearly from 0 over this many or this fraction of all steps.
  warmup_steps: config_lib.Steps = 100
  # Learning rate after the last step, as a fraction of the peak.
  final_fraction: config_lib.Probability = 0.1
  # Applies to kernels and embeddings, except those of routers.
  weight_decay: config_lib.Weight = 0.1
  momentum: config_lib.Decay = 0.9  # For SGD only.
  beta1: config_lib.Decay = 0.9  # AdamW's decay of the mean gradient.
  beta2: config_lib.Decay = 0.95  # AdamW's decay of the mean square.
  epsilon: config_lib.Epsilon = 1e-8  # AdamW adds it to its divisor.
  # Type of AdamW's mean gradients, or of SGD's momentum. AdamW's mean squares
  # stay float32, since bfloat16 would round away the small changes of a step.
  mu_dtype: Literal['float32', 'bfloat16'] = 'float32'
  clip_norm: config_lib.Weight = 1.0  # Largest global norm; 0 = no clipping.
  # (regular expression, factor on the rate, first step) for parameters.
  rules: tuple[tuple[str, config_lib.Weight, config_lib.Steps], ...] = ()
  # Factor on the learning rate per block of distance from the head; 1 = none.
  layer_decay: Annotated[float, config_lib.Range(ge=0.1, le=1)] = 1.0

  def __post_init__(self):
    config_lib.validate(self)
    for i, (pattern, factor, first) in enumerate(self.rules):
      where = f'optimizer.rules[{i}]={(pattern, factor, first)}'
      errors.require_pattern(pattern, where)

  @property
  def switches(self) -> dict[str, bool]:
    """Whether each part that adds to the optimiser's state is switched on.

    Keys are fields of the experiment, for messages; `layer_decay` stands for
    `rules`, too, since both scale the rates of parameters.
    """
    return {
      'optimizer.clip_norm': self.clip_norm > 0,
      'optimizer.layer_decay': bool(self.rules) or self.layer_decay != 1,
    }


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """Returns step -> learning rate, for a run of exactly `num_steps`.

  Raises UserError if the warm-up is not shorter than the run.
  """
  warmup_steps = config_lib.steps_of(config.warmup_steps, num_steps)
  if warmup_steps >= num_steps:
    raise errors.UserError(
      f'optimizer.warmup_steps={config.warmup_steps} leaves nothing of a run'
      f' of {num_steps} steps: shorten the warm-up or lengthen the run.'
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.learning_rate,
    warmup_steps=warmup_steps,
    decay_steps=num_steps,
    end_value=config.learning_rate * config.final_fraction,
  )


def make_optimizer(
  config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformation:
  """Returns the optimiser for a run of `num_steps`.

  AdamW decouples its weight decay from the gradient (Loshchilov & Hutter 2019).
  SGD adds it to the gradient, and its momentum is not Nesterov's. Parameters
  with a later first step accumulate moments until then, which avoids large
  first updates. The norm to clip excludes permanently frozen parameters, and
  that of routers' predictors (`layers.routed.Predictor`) is another. Raises
  UserError if the warm-up, or a rule's first step, lies beyond the run's end.
  """
  rules = tuple(
    (pattern, factor, config_lib.steps_of(first, num_steps))
    for pattern, factor, first in config.rules
  )
  config = dataclasses.replace(config, rules=rules)
  for i, (pattern, factor, first) in enumerate(rules):
    if factor and first >= num_steps:
      raise errors.UserError(
        f'optimizer.rules[{i}]={(pattern, factor, first)} trains nothing in a'
        f' run of {num_steps} steps: start earlier, or freeze it for ever by a'
        ' factor of 0.'
      )
  # Checkpoints identify the optimiser's arrays by the index of their step in
  # this list, so another order makes old checkpoints unreadable.
  steps = []
  if any(factor == 0 for _, factor, _ in rules):
    steps.append(
      optax.masked(
        optax.set_to_zero(),
        lambda tree: jax.tree.map(
          lambda s: not s.factor, _scales(config, tree)
        ),
      )
    )
  switches = config.switches
  if switches['optimizer.clip_norm']:
    clip = optax.clip_by_global_norm(config.clip_norm)
    # Clip predictors separately: they must not affect the language model, and
    # in a common norm their gradients would scale the model's gradients.
    steps += [
      optax.masked(clip, lambda tree: _where(tree, lambda n: not _predicts(n))),
      optax.masked(clip, lambda tree: _where(tree, _predicts)),
    ]
  decay = optax.add_decayed_weights(
    config.weight_decay, lambda tree: _where(tree, is_matrix)
  )
  if config.kind == 'adamw':
    adam = optax.scale_by_adam(
      config.beta1, config.beta2, config.epsilon, mu_dtype=config.mu_dtype
    )
    steps += [adam, decay]
  else:
    trace = optax.trace(config.momentum, accumulator_dtype=config.mu_dtype)
    steps += [decay, trace]
  steps.append(optax.scale_by_learning_rate(schedule(config, num_steps)))
  if switches['optimizer.layer_decay']:
    # This step comes last, so that a factor of 0 also stops weight decay.
    steps.append(_scale_by_name(config))
  return optax.chain(*steps)


@dataclasses.dataclass(frozen=True)
class Scale:
  """Factor on the learning rate of a parameter, and its first step."""

  factor: float
  first_step: float  # A step, or a fraction of all steps, as in the rules.


def scale_of(
  config: OptimizerConfig, name: str, num_blocks: int
) -> Scale | None:
  """Returns the `Scale` of a parameter by name; None if no rule matches.

  The factors of the first matching rule and of the layer-wise decay (Clark et
  al. 2020; as in BEiT, Bao et al. 2022) multiply. With n blocks, the distance
  from the head is n + 1 for the parameters before the blocks, n - i for block
  i, and 0 for all others.
  """
  factor, first_step = 1.0, 0
  if config.rules:
    index = _first_rule(config, name)
    if index is None:
      return None
    _, factor, first_step = config.rules[index]
  if block := _BLOCK.search(name):
    distance = num_blocks - int(block[1])
  else:
    distance = num_blocks + 1 if _STEM.search(name) else 0
  return Scale(factor * config.layer_decay**distance, first_step)


def freezes(config: OptimizerConfig, name: str) -> bool:
  """Returns whether the rules freeze a parameter permanently."""
  index = _first_rule(config, name)
  return index is not None and config.rules[index][1] == 0


def split(config: OptimizerConfig, params) -> tuple[Any, Any]:
  """Returns the trained and the permanently frozen parameters.

  Both are nested dictionaries, as `params`; `trees.join` is the inverse.
  """
  flat = trees.flatten(params)
  frozen = {k: x for k, x in flat.items() if freezes(config, k)}
  trained = {k: x for k, x in flat.items() if k not in frozen}
  return trees.unflatten(trained), trees.unflatten(frozen)


def check_rules(config: OptimizerConfig, params) -> None:
  """Checks that the rules fit a model's parameters (arrays or shapes).

  Raises:
    UserError: a parameter matches no rule, a rule matches no parameter, the
      rules freeze all parameters, or `layer_decay` is set for a model without
      numbered blocks or with several blocks of the same number.
  """
  names = _names(params)
  if config.layer_decay != 1:
    _check_blocks(config, names)
  if not config.rules:
    return
  for i, (pattern, *_) in enumerate(config.rules):
    if not any(re.search(pattern, name) for name in names):
      raise errors.UserError(
        f'optimizer.rules[{i}] matches no parameter by {pattern!r}: the nearest'
        f' names are {_nearest(pattern, names)}.'
      )
  uncovered = [name for name in names if _first_rule(config, name) is None]
  if uncovered:
    raise errors.UserError(
      f'optimizer.rules cover no {_some(uncovered)}: every parameter needs a'
      " rule; end with ('.', 1.0, 0) to train the rest as usual."
    )
  if not any(config.rules[_first_rule(config, name)][1] for name in names):
    raise errors.UserError(
      'optimizer.rules freeze every parameter: give one that matches first a'
      ' factor above 0.'
    )


def _check_blocks(config, names):
  what = f'optimizer.layer_decay={config.layer_decay}'
  stacked = [name for name in names if _STACKED.search(name)]
  if stacked:
    raise errors.UserError(
      f'{what} needs one name for each block, and {stacked[0]} is several of'
      ' them: set model.scan_layers=False.'
    )
  if not _num_blocks(names):
    raise errors.UserError(
      f'{what} counts the blocks block_0, block_1, …, and this model has none:'
      ' set it to 1.'
    )
  stacks = {name[: b.start()] for name in names if (b := _BLOCK.search(name))}
  if len(stacks) > 1:
    raise errors.UserError(
      f'{what} counts the blocks of one stack, and this model has several,'
      f' {" and ".join(sorted(stacks))}: set it to 1, and give each part its'
      ' rate by optimizer.rules.'
    )


def _first_rule(config, name) -> int | None:
  matching = (i for i, r in enumerate(config.rules) if re.search(r[0], name))
  return next(matching, None)


def _num_blocks(names: Iterable[str]) -> int:
  matches = (_BLOCK.search(name) for name in names)
  return max((int(match[1]) + 1 for match in matches if match), default=0)


def _nearest(pattern, names) -> str:
  # A rule may name a prefix of a path, so compare with prefixes, too.
  parts = dict.fromkeys(
    name.rsplit('/', depth)[0] for name in names for depth in range(9)
  )
  close = difflib.get_close_matches(pattern, parts, n=3, cutoff=0.5)
  return _some(close or list(names), limit=3)


def _some(names, limit=8) -> str:
  more = f' and {len(names) - limit} more' if len(names) > limit else ''
  return ', '.join(names[:limit]) + more


def _name(path) -> str:
  """Returns `block_0/mlp/up/kernel` for the path of a leaf."""
  keys = (k.key for k in path if isinstance(k, jax.tree_util.DictKey))
  return '/'.join(keys)


def _names(tree) -> list[str]:
  return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _scales(config, tree):
  """Returns a tree of each parameter's `Scale`; raises as `check_rules`."""
  num_blocks = _num_blocks(_names(tree))

  def one(path, _):
    scale = scale_of(config, _name(path), num_blocks)
    if scale is None:
      check_rules(config, tree)
    return scale

  return jax.tree_util.tree_map_with_path(one, tree)


class _ScaleByNameState(NamedTuple):
  count: jax.Array  # int32 number of updates made.


def _scale_by_name(config) -> optax.GradientTransformation:
  """Scales updates by their parameters' factors; by 0 before the first step."""

  def init(params):
    del params
    return _ScaleByNameState(jnp.zeros((), jnp.int32))

  def update(updates, state, params=None):
    del params

    def one(update, scale):
      if not scale.factor:
        return jnp.zeros_like(update)
      if scale.first_step:
        # `where` instead of a product, since 0 times NaN or infinity is NaN.
        trains = state.count >= scale.first_step
        update = jnp.where(trains, update, 0)
      return update if scale.factor == 1 else scale.factor * update

    updates = jax.tree.map(one, updates, _scales(config, updates))
    return updates, _ScaleByNameState(optax.safe_increment(state.count))

  return optax.GradientTransformation(init, update)


def _where(tree, predicate):
  """Replaces each leaf by the predicate of the names along its path."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: predicate(_name(path).split('/')), tree
  )


def _predicts(names) -> bool:
  return 'predictor' in names


def is_matrix(names) -> bool:
  """Returns whether the names of a path lead to a matrix outside of routers."""
  return names[-1] in _MATRICES and 'router' not in names

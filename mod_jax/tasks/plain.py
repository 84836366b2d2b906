"""Training by the loss of the modality, plus losses of routers and experts."""

from collections.abc import Sequence
import copy
import dataclasses
import functools
import math
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import errors, flops, losses, routing, viz
from mod_jax import optimizer as optimizer_lib
from mod_jax.layers.decisions import Routing
from mod_jax.layers.experts import Assigned, ExpertsConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.routing_config import RoutingConfig
from mod_jax.losses import sums
from mod_jax.losses.sums import MetricSums, Pair
from mod_jax.models import protocol
from mod_jax.pretrained import source as source_lib
from mod_jax.studies.devices import one_device
from mod_jax.tasks import warm_start
from mod_jax.tasks.modality import Modality
from mod_jax.train import evaluation
from mod_jax.train.task import Method

Losses = tuple[list[Pair], MetricSums]  # Terms of the loss; metrics to report.

_COMPARED = 16  # Held-out batches to compare a routed model with the dense one.
_ALIKE = 0.01  # Tolerated relative difference of the two models' losses.
_STREAMS = ('stochastic_depth', 'routing', 'gumbel')


class Plain(Method):
  """The task of training a dense or routed model on a modality.

  Subclasses override what differs: losses, teacher, evaluation and pictures.
  """

  teacher_model = None  # Config of the model that teaches; None for none.
  no_teacher = ''  # Error message if its weights are missing.

  def __init__(self, config, modality: Modality):
    self.config = config
    self.modality = modality
    # All blocks have the same dtype.
    self.dtype = config.model.stack.layers[0].block.dtype

  # Training.

  def init(self, key):
    params_key, routing_key = jax.random.split(key)
    rngs = {'params': params_key, 'routing': routing_key}
    model = self.config.model
    return model.build().init(rngs, model.example())

  def check_init(self, init):
    warm_start.open_init(init, self.config.model)

  def start(self, params, model_state, init):
    optional = self.modality.optional
    return warm_start.load_weights(
      *(init, self.config.model, params, model_state),
      new=optional,
      dropped=optional,
    )

  def teacher(self, mesh):
    del mesh
    if self.teacher_model is None:
      return None
    return self.load_teacher(
      self.teacher_model, self.no_teacher, dropped=self.modality.optional
    )

  def load_teacher(self, model, way_out: str, **kwargs):
    """Returns the variables of the teacher, a frozen model.

    Its weights are at `objective.teacher` or, if that is None, at `init`. If
    both are None, raises UserError with the message `way_out`. `kwargs` are
    those of `load_whole`.
    """
    path = self.config.objective and self.config.objective.teacher
    path = path or self.config.init
    if not path:
      raise errors.UserError(way_out)
    return self.load_whole(path, model, **kwargs)

  def load_whole(self, init: str, model, **kwargs) -> dict[str, Any]:
    """Returns a model's variables, which all come from the weights at `init`.

    `kwargs` are `new` and `dropped` of `warm_start.load_weights`.
    """
    state = protocol.shapes(model)
    params, model_state = warm_start.load_weights(
      init, model, state.pop('params'), state, whole=True, **kwargs
    )
    return {'params': params, **model_state}

  def beginning(self, params, model_state, mesh):
    """Returns a line with the held-out losses of the routed and dense model.

    Warns if the losses differ by more than `_ALIKE`. Returns '' if the model is
    not routed, is adaptive, or starts from the weights of a routed model, and
    if the held-out rows have no loss.
    """
    config = self.config
    if config.model.routing is None or config.model.adaptive is not None:
      return ''
    source = source_lib.Source.of_init(config.init)
    if source.ours and source.config.routing is not None:
      return ''
    routed = at_floor(config.model, self.static_args(0))
    routed_loss, dense_loss = (
      self._held_out_loss(model, params, model_state, mesh)
      for model in (routed, _with_all_tokens(config.model))
    )
    # If all held-out answers are cut off, or all transcripts are longer than
    # their recordings allow, there is no loss.
    if routed_loss is None:
      return ''
    message = (
      f'begins with a held-out loss of {routed_loss:.4f} (at the capacity of'
      f' the first step); the dense model has {dense_loss:.4f}'
    )
    if not abs(routed_loss - dense_loss) < _ALIKE * max(1.0, dense_loss):
      partly = min(_routed_capacities(routed)) < 1
      logging.warning(
        'The routed model does not begin as the dense one, %.4f and not %.4f:'
        ' %s.',
        *(routed_loss, dense_loss),
        'its blocks skip tokens from the first step on, which training may'
        ' mend; train.capacity_warmup_steps=0.2 has their capacity come down'
        ' from 1'
        if partly
        else 'its router weighs what blocks add; set model.routing.gate='
        "'one_plus_tanh', router_norm=True and a small router_std",
      )
    return message

  def _held_out_loss(self, model, params, model_state, mesh) -> float | None:
    task = copy.copy(self)
    task.config = dataclasses.replace(self.config, model=model)
    task.eval_modes = lambda more=False: {'': Mode()}
    return evaluation.held_out(
      task, params, model_state, mesh, batches=_COMPARED
    ).get('loss')

  def static_args(self, step: int) -> float:
    """Returns the lower bound of all capacities, which the warm-up lowers."""
    train = self.config.train
    if self.config.model.routing is None:
      return 0.0
    return routing.capacity_floor(
      step,
      warmup_steps=config_lib.steps_of(
        train.capacity_warmup_steps, train.num_steps
      ),
      stages=train.capacity_warmup_stages,
    )

  def forward(self, model, params, model_state, batch, rng, **mode):
    """Returns the output of a training pass, and the updated model state.

    `model` is the config of the model, and `**mode` are fields of `Mode`.
    """
    args, kwargs = self.modality.inputs(batch, train=True)
    rngs = jax.random.split(rng, len(_STREAMS))
    if model.routing is not None:
      mode['routing'] = model.routing.train_mode
    return model.build(train=True, **mode).apply(
      {'params': params, **model_state},
      *args,
      **kwargs,
      rngs=dict(zip(_STREAMS, rngs, strict=True)),
      mutable=list(model_state),
    )

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    model = at_floor(self.config.model, static_args)
    output, model_state = self.forward(model, params, model_state, batch, rng)
    pairs, metric_sums = joined(
      self.modality.losses(output, batch),
      self.taught(output, batch, teacher),
      self.choice_losses(output, batch, model),
    )
    return pairs, (metric_sums, model_state)

  def taught(self, output, batch, teacher) -> Losses:
    """Returns the losses of distillation; none, unless overridden."""
    del output, batch, teacher
    return [], {}

  def choice_losses(self, output, batch, model) -> Losses:
    """Returns the losses of routers and experts.

    `model` is the config that computed the output: during the capacity warm-up
    its capacities are higher than those in `self.config.model`.
    """
    experts, routed = ([], {}), ([], {})
    if output.experts:
      experts = expert_losses(model.experts, output.experts)
    if output.routing:
      _, kwargs = self.modality.inputs(batch, train=True)
      # Leave out blocks that process every token only because of the warm-up:
      # top-k chooses all tokens, so the loss would only raise all scores.
      choosing = [
        layer
        for layer, capacity, final_capacity in zip(
          output.routing,
          _routed_capacities(model),
          _routed_capacities(self.config.model),
          strict=True,
        )
        if capacity < 1 or final_capacity == 1
      ]
      routed = routing_losses(
        self.config.model.routing, choosing, kwargs.get('valid_BL')
      )
    return joined(experts, routed)

  def flops_per_step(self, static_args):
    model = at_floor(self.config.model, static_args)
    length = self.modality.length
    total = flops.train(model, *length, frozen=self._frozen)
    if self.teacher_model is not None:
      total += flops.forward(self.teacher_model, *length)
    return self.config.train.batch_size * total

  def flops_report(self):
    model, length = self.config.model, self.modality.length
    report = flops.report(model, *length, frozen=self._frozen)
    last_step = self.static_args(self.config.train.num_steps - 1)
    of_run = self.flops_per_step(last_step) / self.config.train.batch_size
    of_model = flops.train(model, *length, frozen=self._frozen)
    if not math.isclose(of_run, of_model):
      report += (
        f'\nstep of this run    {of_run:.4e} FLOPs, of what is trained and of a'
        ' teacher, if any'
      )
    return report

  @property
  def _frozen(self):
    """Predicate for the names of frozen parameters; None if none are frozen."""
    if self.config.train.frozen is None:
      return None
    return functools.partial(optimizer_lib.freezes, self.config.optimizer)

  # Evaluation.

  def eval_modes(self, *, more=False):
    return self.modality.modes(more=more)

  def apply(self, params, model_state, batch, key, mode, model=None, **kwargs):
    """Returns the output of a model on a held-out batch.

    `model` is a config; None takes the task's config. `kwargs` are further
    arguments of Flax's `apply`.
    """
    args, inputs = self.modality.inputs(batch, train=False)
    kwargs |= inputs | {'rngs': {'routing': key}}
    model = (model or self.config.model).build(**vars(mode))
    return model.apply({'params': params, **model_state}, *args, **kwargs)

  def over_held_out(
    self, function, params, model_state, num_batches: int, mode=None, model=None
  ):
    """Yields each held-out batch with the result of `function(output, batch)`.

    The function is jitted; its results are NumPy arrays. `num_batches=0` takes
    all held-out data, `mode=None` is `Mode()`, and `model` is as for `apply`.
    """
    key = jax.random.key(self.config.seed)

    @jax.jit
    def run(params, model_state, batch):
      output = self.apply(
        *(params, model_state, batch, key, mode or Mode()), model=model
      )
      return function(output, batch)

    for batch in self.modality.eval_batches(
      batch_size=self.config.evaluation.batch_size,
      num_batches=num_batches or None,
    ):
      yield batch, jax.device_get(run(params, model_state, batch))

  def on_examples(self, params, model_state, batch, mode, **kwargs):
    """Computes `apply` of a small batch on one device; returns NumPy arrays."""
    with one_device(params, model_state) as variables:
      key = jax.random.key(self.config.seed)
      look = jax.jit(functools.partial(self.apply, mode=mode, **kwargs))
      return jax.device_get(look(*variables, batch, key))

  def eval_step(self, params, model_state, batch, key, mode):
    output = self.apply(params, model_state, batch, key, mode)
    return self.eval_sums(output, batch, mode)

  def eval_sums(self, output, batch, mode) -> MetricSums:
    """Returns the metric sums of a held-out batch."""
    # In rows that only fill the batch, every token has weight 0.
    real_B = self.modality.token_weights(batch).any(axis=-1)
    loads = expert_loads(output.experts, real_B)
    return self.modality.eval_sums(output, batch, mode) | loads

  def finish_metrics(self, metrics):
    return self.modality.finish_metrics(metrics)

  # Reports.

  def summary(self, metrics):
    return self.modality.summary(self, metrics)

  def curves(self, records):
    records = list(records)
    figures = {'curves': self.modality.curves(records)}
    if (experts := self.config.model.experts) is not None:
      figures['experts'] = viz.expert_curves(
        records, null_target=1 - experts.share if experts.num_nulls else None
      )
    return figures

  def pictures(self, params, model_state):
    return self.modality.pictures(self, params, model_state)

  def studies(self):
    def run(study, params, model_state, mesh):
      del mesh  # Its devices may not divide the few rows of a study.
      with one_device(params, model_state) as variables:
        return study(self, *variables)

    return {
      name: functools.partial(run, study)
      for name, study in self.modality.studies().items()
    }

  def finish(self, params, model_state):
    return self.modality.texts(self, params, model_state)


def joined(*terms: Losses) -> Losses:
  """Returns the concatenated terms and the merged metrics of several losses."""
  pairs, metric_sums = [], {}
  for more_pairs, more_sums in terms:
    pairs += more_pairs
    metric_sums |= more_sums
  return pairs, metric_sums


def at_floor(model, floor: float):
  """Returns the model's config with no capacity lower than `floor`."""
  if not floor:
    return model
  floor = max(floor, model.routing.capacity_floor)
  routed = dataclasses.replace(model.routing, capacity_floor=floor)
  return model.with_parts(routing=routed)


def _with_all_tokens(model):
  """Returns a config that acts as the dense model: capacity 1, and no gate."""
  placement = ('period', 'offset', 'first', 'layers', 'capacity_schedule')
  all_tokens = type(model.routing)(
    **{name: getattr(model.routing, name) for name in placement},
    score='stride',
    capacity_floor=1.0,
  )
  return model.with_parts(routing=all_tokens)


def _routed_capacities(config) -> list[float]:
  return [c for c in config.capacities if c is not None]


def routing_losses(
  config: RoutingConfig, layers: Sequence[Routing], valid_BL
) -> Losses:
  """Returns the losses of routed layers, and metric sums to report.

  The router and the predictor learn by cross-entropy which tokens top-k
  chooses. `config.router_loss` is the loss weight of the router; the predictor
  has loss weight 1, since its gradients reach no other parameters.
  `config.balance_loss` weighs the loss that pulls the fraction of tokens with a
  score above 0 (with `per_sequence`, of sequences) towards the capacity.
  `valid_BL` is False for padding; None means that there is no padding.
  """
  pairs, metric_sums = [], {}
  # Scores that are attention, or that ignore the tokens, come from no router.
  has_router = config.scorer.gates and not config.scorer.needs_attention
  for routed in layers:
    among_BL = routed.candidate_BL
    among_BL = valid_BL if among_BL is None else among_BL
    for rule, weight, logit_BL in (
      ('router', config.router_loss, routed.score_BL),
      ('predictor', 1.0, routed.predictor_BL),
    ):
      by_kind = config.kinds is not None and logit_BL is not None and weight
      if not (by_kind and has_router) and rule not in config.causal_rules:
        continue
      total, count = losses.choice_bce(logit_BL, routed.top_k_BL, among_BL)
      pairs.append((weight * total / len(layers), count))
      agreement = losses.choice_agreement(
        logit_BL > 0, routed.top_k_BL, among_BL
      )
      layer_sums = {'bce': (total, count), 'accuracy': agreement['accuracy']}
      layer_sums = {f'{rule}/{name}': pair for name, pair in layer_sums.items()}
      metric_sums = sums.add(metric_sums, layer_sums)
    if config.balance_loss:
      score_BL, chosen_BL, real_BL = routed.score_BL, routed.chosen_BL, valid_BL
      if config.per_sequence:  # One choice each, however long a sequence is.
        score_BL, chosen_BL = score_BL[:, :1], chosen_BL.any(axis=-1)
        if valid_BL is not None:
          real_BL = valid_BL.any(axis=-1, keepdims=True)
      balance, count = losses.path_balance(score_BL, routed.capacity, real_BL)
      pairs.append((config.balance_loss * balance / len(layers), count))
      dropped = routed.overflow_B.sum()
      chosen = chosen_BL.sum()
      layer_sums = {
        'router/balance': (balance, count),
        'router/wanted': (chosen + dropped, count),
        'router/dropped': (dropped, count),
      }
      metric_sums = sums.add(metric_sums, layer_sums)
  return pairs, metric_sums


def expert_losses(config: ExpertsConfig, layers: Sequence[Assigned]) -> Losses:
  """Returns the losses of experts, averaged over layers, and metric sums.

  The balance loss is computed in each layer, since in loads summed over layers
  the imbalances of different layers could cancel.
  """
  pairs, metric_sums = [], expert_loads(layers)
  for assigned in layers:
    total, count = losses.experts.z_loss(assigned.logits_BLX, assigned.valid_BL)
    pairs.append((config.z_loss * total / len(layers), count))
    layer_sums = {'experts/z': (total, count)}
    if config.choice == 'token':
      balance = losses.experts.balance_loss(
        *(assigned.logits_BLX, assigned.wanted_BLX, assigned.valid_BL),
        config.targets,
      )
      pairs.append((config.balance_loss * balance * count / len(layers), count))
      layer_sums['experts/balance'] = (balance, jnp.float32(1))
    metric_sums = sums.add(metric_sums, layer_sums)
  return pairs, metric_sums


def expert_loads(
  layers: Sequence[Assigned], real_B: jax.Array | None = None
) -> MetricSums:
  """Returns the sums of `losses.experts.load` over layers of experts.

  `real_B` is False for rows that only fill the batch; None if all are real.
  """
  metric_sums = {}
  for assigned in layers:
    wanted_BLX, ran_BLE = assigned.wanted_BLX, assigned.ran_BLE
    if real_B is not None:
      wanted_BLX &= real_B[:, None, None]
      ran_BLE &= real_B[:, None, None]
    load = losses.experts.load(wanted_BLX, ran_BLE)
    layer_sums = {f'experts/{name}': pair for name, pair in load.items()}
    metric_sums = sums.add(metric_sums, layer_sums)
  return metric_sums

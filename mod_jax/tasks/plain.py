"""Training by the loss of the modality, plus losses of routers and experts."""

from collections.abc import Sequence
import copy
import dataclasses

from absl import logging
import jax
import jax.numpy as jnp

from mod_jax import flops, losses, viz
from mod_jax.layers.experts import Assigned, ExpertsConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.routing_config import RoutingConfig
from mod_jax.layers.rules import Routing
from mod_jax.losses import sums
from mod_jax.losses.sums import MetricSums, Pair
from mod_jax.tasks import capacity_warmup, warm_start
from mod_jax.tasks.modality import Modality
from mod_jax.train import evaluation
from mod_jax.train import task as task_lib

_COMPARED = 16  # Held-out batches to compare a routed model with the dense one.
_ALIKE = 0.01  # Tolerated relative difference of their losses.
_STREAMS = ('stochastic_depth', 'routing', 'gumbel')


class Plain(task_lib.Task):
  """The task of training a dense or routed model on a modality.

  Subclasses override what differs: losses, teacher, evaluation and pictures.
  """

  def __init__(self, config, modality: Modality):
    self.config = config
    self.modality = modality
    self.unit = modality.unit
    # All blocks have the same dtype.
    self.dtype = config.model.stack.layers[0].block.dtype

  # Data.

  def check(self):
    self.modality.check()

  def files(self):
    return self.modality.files()

  def train_iterator(self, *, shard_index=0, shard_count=1):
    # Raises if held-out data are missing: now, not at the first evaluation.
    self.eval_batches(batch_size=1, num_batches=1)
    return self.modality.train_iterator(
      shard_index=shard_index, shard_count=shard_count
    )

  def data_summary(self):
    return self.modality.data_summary()

  def batch_shapes(self):
    return self.modality.batch_shapes()

  def eval_batches(self, **kwargs):
    return self.modality.eval_batches(**kwargs)

  def data_fingerprint(self):
    return self.modality.data_fingerprint()

  @property
  def tokens_per_step(self):
    return self.modality.tokens_per_step

  # Training.

  def init(self, key):
    params_key, routing_key = jax.random.split(key)
    rngs = {'params': params_key, 'routing': routing_key}
    model = self.config.model
    return model.build().init(rngs, model.example())

  def start(self, params, model_state, init):
    return self.modality.load_weights(
      init,
      self.config.model,
      params,
      model_state,
      new=self.modality.may_be_new,
      dropped=self.modality.may_be_dropped,
    )

  def beginning(self, params, model_state, mesh):
    """Compares the held-out losses of the initial and the dense model."""
    config = self.config
    if (
      config.model.routing is None
      or config.model.adaptive is not None
      or warm_start.is_routed(config.init)
    ):
      return ''
    routed = capacity_warmup.at_floor(config.model, self.static_args(0))
    dense = _with_all_tokens(config.model)
    routed_loss, dense_loss = (
      self._held_out_loss(model, params, model_state, mesh)
      for model in (routed, dense)
    )
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
        'its blocks skip tokens from the first step on;'
        ' train.capacity_warmup_steps=0.2 has their capacity come down from 1'
        if partly
        else 'its router weighs what blocks add; set model.routing.gate='
        "'one_plus_tanh', router_norm=True and a small router_std",
      )
    return message

  def _held_out_loss(self, model, params, model_state, mesh) -> float:
    task = copy.copy(self)
    task.config = dataclasses.replace(self.config, model=model)
    task.eval_modes = lambda more=False: {'': Mode()}
    return evaluation.held_out(
      task, params, model_state, mesh, batches=_COMPARED
    )['loss']

  def static_args(self, step: int) -> float:
    """Returns the minimum capacity of routed layers, by the warm-up."""
    return capacity_warmup.floor(self.config.model, self.config.train, step)

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
    model = capacity_warmup.at_floor(self.config.model, static_args)
    output, model_state = self.forward(model, params, model_state, batch, rng)
    total, weight = self.modality.loss(output, batch)
    metric_sums = {'loss': (total, weight)}
    extra, extra_sums = self.modality.more_losses(output)
    pairs = [(total, weight), *extra]
    metric_sums |= extra_sums
    if teacher is not None:
      extra, extra_sums = self.taught(output, batch, teacher)
      pairs += extra
      metric_sums |= extra_sums
    extra, extra_sums = self.choice_losses(output, batch, model)
    return [*pairs, *extra], (metric_sums | extra_sums, model_state)

  def choice_losses(
    self, output, batch, model
  ) -> tuple[list[Pair], MetricSums]:
    """Returns losses of routers and experts, and sums to report.

    `model` is the config that gave the output; its capacities may be raised by
    a warm-up.
    """
    pairs, metric_sums = [], {}
    if output.experts:
      pairs, metric_sums = expert_losses(model.experts, output.experts)
    if not output.routing:
      return pairs, metric_sums
    _, kwargs = self.modality.inputs(batch, train=True)
    # While the warm-up has a block process every token, there is no choice to
    # predict: the loss would only raise all scores.
    choosing = [
      routed
      for routed, capacity, final_capacity in zip(
        output.routing,
        _routed_capacities(model),
        _routed_capacities(self.config.model),
        strict=True,
      )
      if capacity < 1 or final_capacity == 1
    ]
    extra, extra_sums = routing_losses(
      self.config.model.routing, choosing, kwargs.get('valid_BL')
    )
    return pairs + extra, metric_sums | extra_sums

  def taught(self, output, batch, teacher) -> tuple[list[Pair], MetricSums]:
    """Returns losses by a teacher's output, and sums to report.

    To be overridden by subclasses with a teacher.
    """
    raise NotImplementedError

  def flops_per_step(self, static_args):
    model = capacity_warmup.at_floor(self.config.model, static_args)
    rows = self.config.train.batch_size
    return rows * flops.train(model, *self.modality.length)

  def flops_report(self):
    return flops.report(self.config.model, *self.modality.length)

  # Evaluation.

  def eval_modes(self, *, more=False):
    return self.modality.modes(more=more)

  def apply(self, params, model_state, batch, key, mode):
    """Returns the output on a held-out batch."""
    args, kwargs = self.modality.inputs(batch, train=False)
    model = self.config.model.build(**vars(mode))
    return model.apply(
      {'params': params, **model_state}, *args, **kwargs, rngs={'routing': key}
    )

  def eval_step(self, params, model_state, batch, key, mode):
    output = self.apply(params, model_state, batch, key, mode)
    metric_sums = self.modality.eval_sums(output, batch, mode)
    # Rows of padding have a weight of 0 everywhere.
    real_B = self.modality.token_weights(batch).any(axis=-1)
    metric_sums |= expert_loads(output.experts, real_B)
    return metric_sums | self.more_sums(output, batch, mode)

  def more_sums(self, output, batch, mode) -> MetricSums:
    """Returns further sums of a held-out batch, for subclasses."""
    del output, batch, mode
    return {}

  def finish_metrics(self, metrics):
    return self.modality.finish_metrics(metrics)

  # Reports.

  def main_metrics(self, metrics):
    return self.modality.main_metrics(metrics)

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
    return self.modality.studies(self)

  def finish(self, params, model_state):
    return self.modality.texts(self, params, model_state)


def _with_all_tokens(model):
  """Returns the config with capacity 1, which computes the dense model."""
  placement = ('period', 'offset', 'first', 'layers', 'capacity_schedule')
  routing = type(model.routing)(
    **{name: getattr(model.routing, name) for name in placement},
    score='stride',
    capacity_floor=1.0,
  )
  return model.with_parts(routing=routing)


def _routed_capacities(config) -> list[float]:
  return [c for c in config.capacities if c is not None]


def routing_losses(
  config: RoutingConfig, layers: Sequence[Routing], valid_BL
) -> tuple[list[Pair], MetricSums]:
  """Returns losses to add to the main one, and the sums to report.

  `router_loss` weighs the auxiliary BCE of the router, and `balance_loss` the
  balance of path shares; the predictor's BCE has weight 1, since it has its own
  parameters.
  """
  pairs, metric_sums = [], {}
  for routed in layers:
    for rule, weight, logit_BL in (
      ('router', config.router_loss, routed.score_BL),
      ('predictor', 1.0, routed.predictor_BL),
    ):
      if rule not in config.causal_rules:
        continue
      total, count = losses.choice_bce(logit_BL, routed.top_k_BL, valid_BL)
      pairs.append((weight * total / len(layers), count))
      agreement = losses.choice_agreement(
        logit_BL > 0, routed.top_k_BL, valid_BL
      )
      layer_sums = {'bce': (total, count), 'accuracy': agreement['accuracy']}
      layer_sums = {f'{rule}/{name}': pair for name, pair in layer_sums.items()}
      metric_sums = sums.add(metric_sums, layer_sums)
    if config.balance_loss:
      balance, count = losses.path_balance(
        routed.score_BL, routed.capacity, valid_BL
      )
      pairs.append((config.balance_loss * balance / len(layers), count))
      dropped = routed.overflow_B.sum()
      chosen = routed.chosen_BL.sum()
      layer_sums = {
        'router/balance': (balance, count),
        'router/wanted': (chosen + dropped, count),
        'router/dropped': (dropped, count),
      }
      metric_sums = sums.add(metric_sums, layer_sums)
  return pairs, metric_sums


def expert_losses(
  config: ExpertsConfig, layers: Sequence[Assigned]
) -> tuple[list[Pair], MetricSums]:
  """Returns losses to add to the main one, and the sums to report.

  Losses are computed per layer and averaged: in summed loads, imbalances of
  different layers could cancel.
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

  Args:
    layers: the assignments in each layer.
    real_B: whether rows count, that is, are not padding; None for all.
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

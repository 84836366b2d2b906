"""Adaptive computation modules: training of learners, of gates, and of both."""

import collections
import math

import jax
import jax.numpy as jnp

from mod_jax import errors, flops, routing, viz
from mod_jax.layers import lora
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.acm import ACM
from mod_jax.layers.mode import Mode
from mod_jax.losses import acm as acm_losses
from mod_jax.losses.sums import sum_of_means, weighted_sum
from mod_jax.models import acm
from mod_jax.pretrained import source as source_lib
from mod_jax.studies.devices import one_device
from mod_jax.tasks import warm_start
from mod_jax.tasks.experiment import ACMObjective
from mod_jax.tasks.modality import table
from mod_jax.tasks.plain import Plain, joined


class Adaptive(Plain):
  """Makes a transformer adaptive; see `experiment.ACMObjective`.

  A task is one phase. The first two phases train each adaptive module
  separately, on inputs and outputs from one forward pass of the frozen original
  model; the last phase trains the whole model. If the original is routed or
  pruned, adaptive modules learn from the tokens that reach them.
  """

  def __init__(self, config, modality):
    super().__init__(config, modality)
    self.objective = config.objective or ACMObjective()
    self.modules = acm.modules(config.model)
    self.learners = {
      name: acm_losses.Learners(
        module.min_learners, module.num_learners, module.learner_flops
      )
      for name, module in self.modules.items()
    }

  # Training.

  def start(self, params, model_state, init):
    source = source_lib.Source.of_init(init)
    if source.ours and source.config.adaptive is not None:
      return warm_start.load_weights(
        *(init, None, params, model_state), new=(lora.PARAMETERS,)
      )
    return warm_start.load_weights(
      *(init, self.config.model, params, model_state),
      new=(acm.PARAMETERS, lora.PARAMETERS),
      dropped=acm.replaced(self.config.model),
    )

  def teacher(self, mesh):
    del mesh
    if self.objective.phase == 'all':
      raise errors.UserError(
        "objective.phase='all' is several runs: train them by train.py or"
        " phases.train, or choose one, such as 'learners'."
      )
    return None if self.objective.phase == 'end_to_end' else self.converted()

  def converted(self):
    """Reads the variables of the original model, which is made adaptive."""
    return self.load_teacher(
      acm.without(self.config.model),
      'init is missing: learners and gates learn from the model that is'
      ' converted; give its workdir or checkpoint by --config.init.',
    )

  def static_args(self, step):
    """Returns whether the gates sample their choices in this step."""
    objective = self.objective
    drawn = objective.noise_until * self.config.train.num_steps
    return (
      objective.phase == 'end_to_end'
      and not objective.static_learners
      and step < drawn
    )

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    if self.objective.phase == 'end_to_end':
      return self._end_to_end(
        params, model_state, batch, rng, noise=static_args
      )
    captured = self._capture(teacher, batch, rng, train=True)
    params = stack_lib.unrolled(self.config.model.stack, params)
    metric_sums = [
      self._module_loss(module, acm.subtree(params, name), captured[name])
      for name, module in self.modules.items()
    ]
    # Eq. 3 and 6 are means over the modules. Adam is invariant to this scale,
    # but clipping by the global norm is not.
    pairs = [(total / len(metric_sums), count) for total, count in metric_sums]
    loss, count = sum_of_means(pairs), metric_sums[0][1]
    return pairs, ({'loss': (loss * count, count)}, model_state)

  def _capture(self, teacher, batch, rng, *, train):
    """Runs the teacher; returns `acm.Captured` of replaced modules, by name."""
    model, mode = self.config.model, Mode()
    if train and model.routing is not None:
      mode = Mode(routing=model.routing.train_mode)
    args, kwargs = self.modality.inputs(batch, train=train)
    rngs = {'routing': rng}
    return acm.capture(model, teacher, *args, mode=mode, rngs=rngs, **kwargs)

  def _run_all(self, module, params, z_BLD):
    """Returns outputs with 0, 1, …, N learners, and the choice of the gate."""
    module = ACM(module, mode='all', dtype=self.dtype)
    return module.apply({'params': params}, z_BLD)

  def _module_loss(self, module, params, seen):
    """Returns (total, count) of a module's loss on `seen`, its `Captured`."""
    sums_KBLD, choice = self._run_all(module, params, seen.z_BLD)
    if self.objective.phase == 'learners':
      return acm_losses.distillation(sums_KBLD, seen.y_BLD, seen.valid_BL)
    distance_KBL = acm_losses.distances(sums_KBLD, seen.y_BLD)
    label_BL = acm_losses.gate_labels(
      jax.lax.stop_gradient(distance_KBL), self.objective.tau
    )
    return acm_losses.gate_loss(
      *(choice.logits_BLM, label_BL, module.min_learners, module.temperature),
      seen.valid_BL,
    )

  def _end_to_end(self, params, model_state, batch, rng, noise):
    objective = self.objective
    output, model_state = self.forward(
      *(self.config.model, params, model_state, batch, rng),
      learners=objective.static_learners or 'train',
      noise=noise,
      masks=False,
    )
    pairs, metric_sums = joined(
      self.modality.losses(output, batch),
      self.choice_losses(output, batch, self.config.model),
    )
    if objective.static_learners:
      return pairs, (metric_sums, model_state)
    _, count = pairs[0]
    choices = stack_lib.collect(output.aux, 'adaptive')
    chosen = {name: choice.one_hot_BLM for name, choice in choices.items()}
    valid = {name: choice.valid_BL for name, choice in choices.items()}
    load_B = acm_losses.load_per_image(chosen, self.learners, valid)
    weight_B = acm_losses.row_weights(
      self.modality.inputs(batch, train=True)[1].get('valid_BL')
    )
    share_B = acm_losses.learners_per_image(chosen, self.learners, valid)
    metric_sums['load'] = weighted_sum(load_B, weight_B)
    terms = {
      'budget': acm_losses.budget_loss(load_B, objective.budget, weight_B),
      'entropy': acm_losses.entropy_loss(chosen, valid),
      'diversity': acm_losses.diversity_loss(share_B, weight_B),
    }
    for name, term in terms.items():
      weight = getattr(objective, f'{name}_weight')
      pairs.append((weight * term * count, count))
      metric_sums[name] = (term * count, count)
    return pairs, (metric_sums, model_state)

  def flops_per_step(self, static_args):
    """Returns the FLOPs of a step; a backward pass counts as two forward ones.

    The phases `learners` and `gates` add a forward pass of the teacher; `gates`
    also adds a forward pass of the learners, which it does not train.
    """
    model, batch = self.config.model, self.config.train.batch_size
    if self.objective.phase in ('end_to_end', 'all'):
      if static := self.objective.static_learners:
        return batch * 3 * 2 * self.macs(learners=static)
      length = self.modality.length
      return batch * flops.train(model, *length, frozen=self._frozen)
    parts = self._flops_by_part()
    own = 3 * parts['learners']
    if self.objective.phase == 'gates':
      own = parts['learners'] + 3 * parts['gate']
    teacher = flops.forward(acm.without(model), *self.modality.length)
    return batch * (teacher + own)

  def flops_report(self):
    return f'{super().flops_report()}\n\n' + acm.report(
      self.config.model, *self.modality.length
    )

  # Evaluation.

  @property
  def num_learners(self) -> int:
    return self.config.model.adaptive.num_learners

  def eval_modes(self, *, more=False):
    """Returns modes for each number of learners, and for trained gates.

    The metrics `k2/…` are measured with two learners in every module. Trained
    gates have further metrics. `load` is the fraction of the cost of all
    learners that a row spends on the tokens that reach them, averaged over
    rows; `load_std` and `token_std` are standard deviations of this fraction
    over rows and over tokens. `budget_error` is the load minus the budget, and
    `gmacs` are billions of multiply-accumulates of a row. A routed model with
    gates is evaluated under top-k, without a prefix, and under its other rules,
    with prefixes such as `never/`.
    """
    if more:
      return {}
    if static := self.objective.static_learners:
      return {f'k{static}/': Mode(learners=static)}
    counts = range(1, self.num_learners + 1)
    fixed = {f'k{k}/': Mode(learners=k) for k in counts}
    if self.objective.phase == 'learners':
      return fixed
    _, *others = self.modality.modes().items()  # The first is top-k.
    return {'': Mode(), **dict(others), **fixed}

  def eval_sums(self, output, batch, mode):
    metric_sums = super().eval_sums(output, batch, mode)
    if mode != Mode():
      return metric_sums
    choices = stack_lib.collect(output.aux, 'adaptive')
    real_B1 = self.modality.token_weights(batch)
    # Take the length of this batch: batches of recordings differ in length.
    length = real_B1.shape[1] if self.modality.length else None
    spent_BL, whole_BL = (x * real_B1 for x in self._compute(choices, length))
    whole_B = whole_BL.sum(axis=-1)
    count = jnp.sum(whole_B > 0)
    # The load of a row of padding is 0.
    load_B = _ratio(spent_BL.sum(axis=-1), whole_B)
    # Weigh each token by the cost of all learners of the modules it reaches.
    token_square = jnp.sum(spent_BL * _ratio(spent_BL, whole_BL))
    whole = self._whole(choices)
    tokens = whole_B.sum() / whole
    return metric_sums | {
      'load': (load_B.sum(), count),
      'load_square': (jnp.sum(load_B**2), count),
      'token': (spent_BL.sum() / whole, tokens),
      'token_square': (token_square / whole, tokens),
    }

  def _whole(self, choices) -> float:
    """Returns the cost per token if all learners of these modules run."""
    reached = [self.learners[name] for name in choices]
    return sum(learners.cost * learners.max for learners in reached)

  def _compute(self, choices, length=None) -> tuple[jax.Array, jax.Array]:
    """Returns spent_BL and whole_BL, the compute of each token.

    `spent` is the cost of the learners that the token ran, and `whole` the cost
    of all learners of the modules that it reached; both are 0 for a token that
    reached no module. `length` is the number of tokens of a row; None takes the
    modality's length or, if the modality has none, the model's.
    """
    if length is None:
      (length,) = self.modality.length or (self.config.model.num_tokens,)
    total_BL2 = 0.0
    for name, choice in choices.items():
      learners = self.learners[name]
      ran_BK = choice.learners_BL.astype(jnp.float32)
      cost_BK2 = jnp.stack([ran_BK, jnp.full_like(ran_BK, learners.max)], -1)
      cost_BK2 *= learners.cost
      if choice.valid_BL is not None:
        cost_BK2 *= choice.valid_BL[..., None]
      if choice.index_BL is not None:
        cost_BK2 = routing.scatter_add_tokens(
          jnp.zeros((len(ran_BK), length, 2)), choice.index_BL, cost_BK2
        )
      total_BL2 += cost_BK2
    return total_BL2[..., 0], total_BL2[..., 1]

  def share_per_token(self, choices, length=None) -> jax.Array:
    """Returns share_BL: the fraction of the learners' cost that a token spent.

    The whole is the cost of all learners of all modules in `choices`, whether
    or not the token reaches them. `choices` are the gates' choices of some or
    all adaptive modules, by name; `length` is as for `_compute`.
    """
    return self._compute(choices, length)[0] / self._whole(choices)

  def load_per_row(self, choices) -> jax.Array:
    """Returns load_B: the fraction of the learners' cost that a row spent.

    The whole is the cost of all learners, summed over the tokens that reach
    each module, as in the budget loss.
    """
    spent_BL, whole_BL = self._compute(choices)
    return _ratio(spent_BL.sum(axis=-1), whole_BL.sum(axis=-1))

  def finish_metrics(self, metrics):
    metrics = super().finish_metrics(metrics)
    if 'load' in metrics:
      metrics['gmacs'] = self.macs(metrics['load']) / 1e9
      # Rows differ in length, so means over rows and tokens differ.
      means = {'load': metrics['load'], 'token': metrics.pop('token')}
      for name, mean in means.items():
        square = metrics.pop(f'{name}_square')
        metrics[f'{name}_std'] = math.sqrt(max(0.0, square - mean**2))
      metrics['budget_error'] = metrics['load'] - self.objective.budget
    return metrics

  def macs(self, load: float = 1.0, learners: int | None = None) -> float:
    """Returns multiply-accumulates of an image or sequence.

    `load` is the mean fraction of the learners' cost that the gates spend on
    tokens that reach them. If `learners` is given, every token runs that number
    of learners: `load` is ignored, and the gates are not counted.
    """
    parts = self._flops_by_part()
    if learners is not None:
      load = learners / self.num_learners
      del parts['gate']
    parts['learners'] *= load
    return sum(parts.values()) / 2

  def _flops_by_part(self):
    """Returns the FLOPs of all layers and learners on a row, by part."""
    parts = collections.Counter()
    for _, row in self.config.model.flops_table(*self.modality.length):
      parts.update(row)
    return dict(parts)

  def main_metrics(self, metrics):
    names = (*self.modality.main, 'load', 'load_std', 'gmacs')
    if 'loss' not in metrics:
      prefix = list(self.eval_modes())[-1]
      names = tuple(f'{prefix}{name}' for name in self.modality.main)
    return {name: metrics[name] for name in names if name in metrics}

  def summary(self, metrics):
    rows, twin = [], self.config.model.dense_twin()
    dense = flops.published_macs(twin, *self.modality.length)
    for prefix, mode in self.eval_modes().items():
      title = prefix.rstrip('/') or 'gated'
      # Under other rules than top-k, the number of routed tokens is not known.
      cost = ['-'] * 3
      if mode == Mode() or mode.learners != 'gated':
        learners = None if mode == Mode() else mode.learners
        load = learners / self.num_learners if learners else metrics['load']
        macs = self.macs(load, learners)
        cost = [f'{load:.4f}', f'{macs / 1e9:.4f}', f'{macs / dense:.3f}']
        title = f'k = {learners}' if learners else title
      rows.append((title, prefix, *cost))
    more = ('load', 'GMACs', 'of dense')
    lines = table(metrics, self.modality.columns, rows, more=more)
    if 'load' in metrics:
      spread = metrics['load_std'] * self._flops_by_part()['learners'] / 2e9
      lines.append(
        f'budget {self.objective.budget:.3f}, load {metrics["load"]:.4f}'
        f' (error {metrics["budget_error"]:+.4f}); standard deviation over'
        f' {self.modality.row} {metrics["load_std"]:.4f} ({spread:.4f} GMACs),'
        f' over tokens {metrics["token_std"]:.4f}'
      )
    return '\n'.join(lines)

  # Reports.

  def pictures(self, params, model_state):
    figures, model = {}, self.config.model
    if self.objective.phase in ('learners', 'gates'):
      # In the end-to-end phase learners no longer imitate the dense module.
      figures = self._error_map(params)
    # If the model is not dense even without its adaptive modules, draw its
    # routing, pruning, merging or experts.
    if acm.without(model) != model.dense_twin():
      figures |= self.modality.pictures(self, params, model_state)
    if self.objective.phase == 'learners' or self.objective.static_learners:
      return figures
    return figures | self.modality.load_pictures(self, params, model_state)

  def _error_map(self, params):
    """Plots an MLP's error by number of learners, as Figure 5 of the paper.

    Returns {} if the weights of the original model are gone.
    """
    name = next(
      (n for n in self.modules if n.endswith('/mlp')), next(iter(self.modules))
    )
    try:
      teacher = self.converted()
    except errors.UserError:
      return {}  # The converted model no longer exists.
    (batch,) = self.modality.eval_batches(batch_size=16, num_batches=1)
    model, key = self.config.model, jax.random.key(self.config.seed)

    @jax.jit
    def measure(params, teacher, batch):
      captured = self._capture(teacher, batch, key, train=False)[name]
      params = acm.subtree(stack_lib.unrolled(model.stack, params), name)
      sums_KBLD, _ = self._run_all(self.modules[name], params, captured.z_BLD)
      distance_KBL = acm_losses.distances(sums_KBLD, captured.y_BLD)
      valid_BL = captured.valid_BL
      if valid_BL is None:
        valid_BL = jnp.ones(distance_KBL.shape[1:], bool)
      return distance_KBL, valid_BL

    with one_device(params, teacher) as (params, teacher):
      distance_KBL, valid_BL = jax.device_get(measure(params, teacher, batch))
    figure = viz.error_by_learners(
      distance_KBL[:, valid_BL],
      module=name,
      title='Error against the dense module, by learners and token',
    )
    return {'error_by_learners': figure}


def _ratio(part, whole):
  """Returns part / whole, and 0 where whole is 0."""
  return part / jnp.where(whole > 0, whole, 1)

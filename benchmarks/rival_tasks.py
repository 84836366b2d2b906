"""Tasks that train the models of `rivals.py`, each from a dense one's weights.

Where pictures cost differently, their mean number of MFLOPs is a held-out
metric, `mflops`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import rivals

from mod_jax import flops, trees
from mod_jax.layers import stack
from mod_jax.layers.mlp import MLPConfig
from mod_jax.models.vit import ViTConfig, ViTOutput
from mod_jax.tasks import warm_start
from mod_jax.tasks.images import Images
from mod_jax.tasks.plain import Plain, joined

# A-ViT's weights: of the paper for a small model, but for that of the halting
# distribution, which is Wójcik et al.'s (2023) for short training.
_PONDER, _SPREAD = 5e-4, 1.0
EXIT_NAMES = '^(hidden|logit_norm|exit|weight|bias)_.*'


class Rival(Plain):
  """What the tasks share; the config's model is the dense one."""

  def __init__(self, config):
    super().__init__(config, Images(config))

  def pictures(self, params, model_state):
    return {}  # Those of the modality are of the dense model.

  def eval_step(self, params, model_state, batch, key, mode):
    variables, weight_B = {'params': params, **model_state}, batch['weight']
    output, more = self.evaluated(variables, batch['image'])
    return self.modality.eval_sums(output, batch, mode) | {
      name: ((x_B * weight_B).sum(), weight_B.sum())
      for name, x_B in more.items()
    }

  def evaluated(self, variables, images_BHWC):
    """Returns the output with logits_BV, and further metrics of a picture."""
    raise NotImplementedError  # Each rival has its own.


class Halting(Rival):
  """Trains a vision transformer to halt tokens.

  A halting score is a channel of the features, so there are no more parameters
  than the dense model's. A further metric is the number of blocks that the mean
  token runs.
  """

  def __init__(self, config, depth: float):
    """`depth` is the block around which tokens halt, as in `halting_loss`."""
    super().__init__(config)
    self._depth = depth
    self._model = rivals.AViTConfig(backbone=config.model)

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    output, model_state = self._model.build(train=True).apply(
      {'params': params, **model_state},
      batch['image'],
      rngs={'stochastic_depth': rng},
      mutable=list(model_state),
    )
    rows = jnp.float32(len(batch['image']))
    halting = rows * rivals.halting_loss(output, _PONDER, _SPREAD, self._depth)
    pairs, metric_sums = joined(
      self.modality.losses(output, batch),
      ([(halting, rows)], {'halting': (halting, rows)}),
    )
    return pairs, (metric_sums, model_state)

  def evaluated(self, variables, images_BHWC):
    output = self._model.build().apply(variables, images_BHWC)
    blocks_B = output.running_BI.sum(axis=-1) / self.config.model.num_tokens
    return output, {
      'mflops': self.mflops(output.running_BI),
      'blocks': blocks_B,
    }

  def mflops(self, running_BI):
    """Returns the FLOPs of each picture in millions, with tokens removed."""
    model = self.config.model
    table_IN = [
      [
        flops.products(model.block_flops(i, n))
        for n in range(model.num_tokens + 1)
      ]
      for i in range(model.num_layers)
    ]
    outside = flops.forward(model) - sum(row[-1] for row in table_IN)
    block_I = jnp.arange(model.num_layers)
    mega_IN = jnp.array(table_IN, jnp.float32) / 1e6
    return outside / 1e6 + mega_IN[block_I, running_BI].sum(axis=-1)


class Exits(Rival):
  """Trains the exits of Zero Time Waste, and the backbone as without them."""

  def __init__(self, config, threshold: float):
    """A picture leaves where a class is more probable than `threshold`."""
    super().__init__(config)
    self._threshold = threshold
    self._model = rivals.ZTWConfig(backbone=config.model)

  def init(self, key):
    return self._model.build().init(key, self.config.model.example())

  def start(self, params, model_state, init):
    return warm_start.load_weights(
      *(init, self.config.model, params, model_state), new=(EXIT_NAMES,)
    )

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    log_BIV, model_state = self._model.build(train=True).apply(
      {'params': params, **model_state},
      batch['image'],
      rngs={'stochastic_depth': rng},
      mutable=list(model_state),
    )
    *exits, (last, metric_sums) = (
      self.modality.losses(_output(log_BIV[:, i]), batch)
      for i in range(log_BIV.shape[1])
    )
    pairs = [pair for pairs, _ in exits for pair in pairs]
    return pairs + last, (metric_sums, model_state)

  def evaluated(self, variables, images_BHWC):
    log_BIV = self._model.build().apply(variables, images_BHWC)
    leaves_BI = jnp.exp(log_BIV).max(axis=-1) > self._threshold
    left_B = leaves_BI.at[:, -1].set(True).argmax(axis=1)
    log_BV = log_BIV[jnp.arange(len(left_B)), left_B]
    mega_I = jnp.array(self._model.exit_flops(), jnp.float32) / 1e6
    return _output(log_BV), {'mflops': mega_I[left_B], 'blocks': left_B + 1}


class MoEfication(Rival):
  """Trains a model whose feed-forwards run some of their neurons.

  The config's model has `rivals.MoEfied` as feed-forward, and starts from a run
  of `with_relu`.
  """

  def start(self, params, model_state, init):
    model = self.config.model
    of_relu = self.load_whole(init, with_relu(model))['params']
    for i in range(model.num_layers):
      block = of_relu[f'block_{i}']
      up_DF = np.asarray(block['mlp']['up']['kernel'])
      neuron_EF = rivals.split_neurons(up_DF, model.feed_forward.num_experts)
      block['mlp'] = rivals.moefied_params(block['mlp'], neuron_EF)
    merged = trees.merge(params, of_relu, new=('.*/mlp/r[01]/.*',))
    return merged, model_state

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    output, model_state = self.forward(
      self.config.model, params, model_state, batch, rng
    )
    rows = jnp.float32(len(batch['image']))
    of_blocks = stack.collect(output.aux, 'moefied')
    routers = rows * sum(
      rivals.router_loss(score_BLE, x_BLD, params[f'block_{i}']['mlp'])
      for i, (score_BLE, x_BLD) in enumerate(of_blocks.values())
    )
    pairs, metric_sums = joined(
      self.modality.losses(output, batch),
      ([(routers, rows)], {'routers': (routers, rows)}),
    )
    return pairs, (metric_sums, model_state)

  def evaluated(self, variables, images_BHWC):
    return self.config.model.build().apply(variables, images_BHWC), {}


def with_relu(model: ViTConfig) -> ViTConfig:
  """Returns the model whose neurons `model`, that of `MoEfication`, runs."""
  experts = model.feed_forward
  relu = MLPConfig(
    width=experts.width, hidden=experts.hidden, kind='relu', bias=True
  )
  return dataclasses.replace(model, feed_forward=relu)


def _output(logits_BV):
  return ViTOutput(logits_BV=logits_BV, features_BLD=None)

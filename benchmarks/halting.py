"""A task for A-ViT, whose tokens halt after different blocks."""

import jax.numpy as jnp
import rivals

from mod_jax import flops
from mod_jax.tasks.images import Images
from mod_jax.tasks.plain import Plain, joined

# Of the paper for a small model, but for the weight of the halting
# distribution, which is Wójcik et al.'s (2023) for short training.
_PONDER, _SPREAD = 5e-4, 1.0


class Halting(Plain):
  """Trains a vision transformer to halt tokens, from a dense one's weights.

  The config's model is the dense one: a halting score is a channel of the
  features, so there are no more parameters. Metrics are also the FLOPs of a
  picture without its halted tokens, `mflops`, and the blocks that the mean
  token runs.
  """

  def __init__(self, config, depth: float):
    """`depth` is the block around which tokens halt, as in `halting_loss`."""
    super().__init__(config, Images(config))
    self._depth = depth
    self._model = rivals.AViTConfig(backbone=config.model)

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    output, model_state = self._model.build(train=True).apply(
      {'params': params, **model_state},
      batch['image'],
      mutable=list(model_state),
    )
    rows = jnp.float32(len(batch['image']))
    halting = rows * rivals.halting_loss(output, _PONDER, _SPREAD, self._depth)
    pairs, metric_sums = joined(
      self.main_loss(output, batch),
      ([(halting, rows)], {'halting': (halting, rows)}),
    )
    return pairs, (metric_sums, model_state)

  def eval_step(self, params, model_state, batch, key, mode):
    variables, weight_B = {'params': params, **model_state}, batch['weight']
    output = self._model.build().apply(variables, batch['image'])
    mega_B = self._mflops(output.running_BI)
    more = {'mflops': mega_B, 'blocks': output.running_BI.sum(axis=-1)}
    more['blocks'] /= self.config.model.num_tokens
    return self.modality.eval_sums(output, batch, mode) | {
      name: ((x_B * weight_B).sum(), weight_B.sum())
      for name, x_B in more.items()
    }

  def _mflops(self, running_BI):
    """Returns the FLOPs of each picture in millions, with tokens removed."""
    model = self.config.model
    table_IN = [
      [
        sum(model.block_flops(i, n).values())
        for n in range(model.num_tokens + 1)
      ]
      for i in range(model.num_layers)
    ]
    outside = flops.forward(model) - sum(row[-1] for row in table_IN)
    block_I = jnp.arange(model.num_layers)
    mega_IN = jnp.array(table_IN, jnp.float32) / 1e6
    return outside / 1e6 + mega_IN[block_I, running_BI].sum(axis=-1)

  def pictures(self, params, model_state):
    return {}  # Those of the modality are of the dense model.

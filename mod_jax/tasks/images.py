"""Image classification."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import errors, flops, losses, viz
from mod_jax.data import images as images_lib
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.attention import attention_map
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.studies import devices
from mod_jax.studies import images as studies
from mod_jax.tasks import expert_pictures, warm_start
from mod_jax.tasks.modality import Modality

# The file of the class names in a run's directory.
CLASSES = 'classes.json'
_PICTURED = 6  # Number of held-out images in the pictures.
_NAMED = 10  # Number of classes to list when training starts.


class Images(Modality):
  """Classification of images into one of several classes."""

  unit = 'images'
  row = 'images'
  columns = ('accuracy', 'top5', 'loss')
  main = ('loss', 'accuracy', 'top5')
  # A dense checkpoint fits a routed or pruned model, and vice versa.
  may_be_new = (
    r'(block_\d+/)?router/.*',
    r'prediction_\d+/.*',
    r'pattern_\d+',
  )
  may_be_dropped = may_be_new
  one_device = staticmethod(devices.one_device)

  @functools.cached_property
  def classes(self) -> tuple[str, ...]:
    """The class names of the data, looked up on first use."""
    return images_lib.class_names(self.config.data)

  def check(self):
    model, count = self.config.model, len(self.classes)
    if model.num_classes != count:
      inner = 'backbone.' if hasattr(model, 'backbone') else ''
      field = f'model.{inner}num_classes'
      raise errors.UserError(
        f'{field}={model.num_classes}, but the data have {count}: set'
        f' {field}={count}.'
      )

  def files(self):
    # The training images may be missing where the model is used later.
    return {CLASSES: json.dumps(self.classes, indent=1)}

  def train_iterator(self, *, shard_index, shard_count):
    return images_lib.train_iterator(
      self.config.data,
      batch_size=self.config.train.batch_size // shard_count,
      seed=self.config.seed,
      shard_index=shard_index,
      shard_count=shard_count,
    )

  def rows_per_epoch(self):
    return images_lib.num_examples(self.config.data)

  def data_summary(self):
    held_out = images_lib.num_examples(self.config.data, 'eval')
    classes = self.classes
    shown = ', '.join(classes[:_NAMED]) + ', …' * (len(classes) > _NAMED)
    return (
      f'{self.rows_per_epoch():,} images for training, {held_out:,} held out,'
      f' {len(classes)} classes: {shown}'
    )

  def batch_shapes(self):
    rows, size = self.config.train.batch_size, self.config.data.image_size
    shapes = {
      'image': (rows, size, size, 3),
      'target': (rows, self.config.model.num_classes),
    }
    return {k: jax.ShapeDtypeStruct(v, 'float32') for k, v in shapes.items()}

  def eval_batches(self, **kwargs):
    return images_lib.eval_batches(self.config.data, **kwargs)

  def data_fingerprint(self):
    return images_lib.fingerprint(self.config.data)

  @property
  def tokens_per_step(self):
    return self.config.train.batch_size

  def inputs(self, batch, *, train):
    return (batch['image'],), {}

  def loss(self, output, batch):
    return losses.classification_loss(output.logits_BV, batch['target'])

  def eval_sums(self, output, batch, mode):
    logits_BV, label_B = output.logits_BV, batch['label']
    weight_B = batch['weight']
    target_BV = jax.nn.one_hot(label_B, logits_BV.shape[-1])
    metric_sums = {
      'loss': losses.classification_loss(logits_BV, target_BV, weight_B)
    }
    for name, k in (('accuracy', 1), ('top5', 5)):
      # With few classes, top-5 accuracy would be trivial.
      if 2 * k <= logits_BV.shape[-1]:
        metric_sums[name] = losses.top_k_accuracy(
          logits_BV, label_B, k, weight_B
        )
    return metric_sums

  def token_weights(self, batch):
    return batch['weight'][:, None]

  def modes(self, *, more=False):
    """Returns the plain mode, and for routed models one that skips blocks.

    Not if experts choose their tokens: then the rule `never` would also change
    their choices.
    """
    if more:
      return {}
    modes, model = {'': Mode()}, self.config.model
    tokens_choose = model.experts is None or model.experts.choice == 'token'
    if model.routing is not None and tokens_choose:
      modes['never/'] = Mode(routing=RoutingMode(rule='never'))
    return modes

  def load_weights(self, init, model, params, model_state, **kwargs):
    return warm_start.load_image_weights(
      init, model, params, model_state, **kwargs
    )

  # Reports.

  def summary(self, task, metrics):
    columns = [c for c in self.columns if c in metrics]
    rows = [('model', '', self.config.model)]
    if 'never/loss' in metrics:
      rows.append(('never', 'never/', None))
    titles = (*columns, 'GMACs', 'GFLOPs', 'parameters')
    lines = [''.ljust(8) + ''.join(t.rjust(12) for t in titles)]
    for title, prefix, model in rows:
      cells = [f'{metrics[prefix + c]:.4f}' for c in columns]
      if model is not None:
        macs = flops.published_macs(model)
        cells += [f'{macs / 1e9:.4f}', f'{flops.forward(model) / 1e9:.4f}']
        cells.append(f'{flops.num_params(model):,}')
      lines.append(title.ljust(8) + ''.join(c.rjust(12) for c in cells))
    lines.append(
      'GMACs: what published tables call GFLOPs; a multiply-add counts once,'
      ' and norms count too.'
    )
    if 'never/loss' in metrics:
      lines.append('never: routed blocks left out, the trivial baseline.')
    return '\n'.join(lines)

  def curves(self, records):
    return viz.loss_curves(
      records, title='Loss and accuracy over training', classifier=True
    )

  def studies(self, task):
    by_name = {'throughput': functools.partial(studies.throughput, task)}
    model = self.config.model
    # The study runs the dense model with the same weights.
    if model.routing is not None and model == dataclasses.replace(
      model.dense_twin(), routing=model.routing
    ):
      by_name['importance'] = functools.partial(studies.importance, task)
    return by_name

  def examples(self, count: int) -> dict[str, np.ndarray]:
    """Returns held-out images, spread over all of them, without padding."""
    batch = next(iter(self.eval_batches(batch_size=count, num_batches=1)))
    real_B = batch['weight'] > 0
    return {name: value[real_B] for name, value in batch.items()}

  def look(self, task, params, model_state):
    """Returns images, labels, the model's output, and its intermediates."""
    batch = self.examples(_PICTURED)
    key = jax.random.key(self.config.seed)

    @jax.jit
    def look(params, model_state, images_BHWC):
      return self.config.model.build().apply(
        {'params': params, **model_state},
        images_BHWC,
        rngs={'routing': key},
        mutable='intermediates',
      )

    output, state = jax.device_get(look(params, model_state, batch['image']))
    guess_B = output.logits_BV.argmax(axis=-1)
    labels = [
      self.classes[label]
      if label == guess
      else f'true {self.classes[label]} → predicted {self.classes[guess]}'
      for label, guess in zip(batch['label'], guess_B, strict=True)
    ]
    shown_BHWC = images_lib.denormalize(self.config.data, batch['image'])
    return shown_BHWC, labels, output, state['intermediates']

  def pictures(self, task, params, model_state):
    model = self.config.model
    if isinstance(model, DynamicViTConfig) and model.score == 'structural':
      return {}
    with self.one_device(params, model_state) as variables:
      looked = self.look(task, *variables)
      if model.experts is not None:
        load = expert_pictures.load_picture(
          *(task, *variables, Mode()),
          'Held-out images: how many tokens each expert takes',
        )
      if isinstance(model, DynamicViTConfig):
        kept_SN, count = self._kept(task, *variables)
    figures = {}
    if model.experts is not None:
      figures = {'expert_load': load, 'expert_map': self._draw_experts(*looked)}
    if model.routing is not None:
      figures['routing'] = self._draw_routing(*looked)
    if isinstance(model, DynamicViTConfig):
      return figures | self._draw_stages(*looked, kept_SN, count)
    return figures | self._draw_attention(*looked)

  def _draw_routing(self, shown_BHWC, labels, output, seen):
    del seen
    model = self.config.model
    backbone = getattr(model, 'backbone', model)
    routed = [i for i, c in enumerate(model.capacities) if c is not None]
    chosen = []
    for i, routed_block in zip(routed, output.routing, strict=True):
      # All images have equally many tokens left, in order.
      chosen_BL = np.zeros((len(labels), model.num_tokens), bool)
      chosen_BL[self._left(output, i)] = np.ravel(routed_block.chosen_BL)
      chosen.append(chosen_BL)
    return viz.patch_maps(
      shown_BHWC,
      np.stack(chosen)[:, :, backbone.num_prefix :],
      layers=routed,
      grid=(backbone.grid,) * 2,
      num_layers=backbone.num_layers,
      labels=labels,
      title='Which patches each routed block processes',
    )

  def _draw_experts(self, shown_BHWC, labels, output, seen):
    del seen
    model = self.config.model
    backbone = getattr(model, 'backbone', model)
    expert_RBL, more_RBL, _ = expert_pictures.takers(
      output.experts, model.num_tokens
    )
    return viz.expert_patches(
      shown_BHWC,
      expert_RBL[..., backbone.num_prefix :],
      layers=expert_pictures.blocks(model),
      grid=(backbone.grid,) * 2,
      num_experts=model.experts.num_experts,
      more_RBL=more_RBL[..., backbone.num_prefix :],
      num_layers=backbone.num_layers,
      labels=labels,
      title='Which expert takes which patch',
    )

  def _left(self, output, block):
    """Returns mask_BL: the tokens of each image that reach a block."""
    model = self.config.model
    left_BL = np.ones((len(output.logits_BV), model.num_tokens), bool)
    for s, stage in enumerate(getattr(model, 'stages', ())):
      if stage <= block:
        left_BL[:, model.backbone.num_prefix :] = output.keep_SBN[s] > 0
    return left_BL

  def _draw_stages(self, shown_BHWC, labels, output, seen, kept_SN, count):
    """Draws the patches left after each stage, and their frequency."""
    del seen
    model = self.config.model
    kwargs = {'grid': (model.backbone.grid,) * 2, 'blocks': model.stages}
    return {
      'stages': viz.token_stages(
        shown_BHWC,
        output.keep_SBN > 0,
        labels=labels,
        title='Which patches are left after each stage',
        **kwargs,
      ),
      'keep_probability': viz.keep_probability(
        kept_SN,
        count=count,
        title='How often each patch is kept, over held-out images',
        **kwargs,
      ),
    }

  def _kept(self, task, params, model_state):
    """Returns the fraction of images that keep each patch, and their number."""
    key = jax.random.key(self.config.seed)

    @jax.jit
    def kept(params, model_state, batch):
      output = task.apply(params, model_state, batch, key, Mode())
      return jnp.einsum('SBN,B->SN', output.keep_SBN, batch['weight'])

    total_SN, count = 0.0, 0
    settings = self.config.evaluation
    for batch in self.eval_batches(
      batch_size=settings.batch_size, num_batches=settings.final_batches or None
    ):
      total_SN += np.asarray(kept(params, model_state, batch))
      count += int(batch['weight'].sum())
    return total_SN / max(count, 1), count

  def _draw_attention(self, shown_BHWC, labels, output, seen):
    del labels, output
    model = self.config.model
    grid, prefix = (model.grid, model.grid), model.num_prefix
    routed = [i for i, c in enumerate(model.capacities) if c is not None]
    # Draw the maps of dense blocks just before routed ones, which may be routed
    # by them, or else of some dense blocks. Routed blocks lack most tokens.
    dense = [i for i in range(model.num_layers) if i not in routed]
    layers = [i for i in dense if i + 1 in routed]
    if not layers:
      spread = np.linspace(0, len(dense) - 1, min(4, len(dense)))
      layers = [dense[round(x)] for x in spread]
    if not layers:
      return {}
    maps_RHL = []
    for layer in layers:
      attention = seen[f'block_{layer}']['attention']
      weight_BHQS = attention_map(
        attention['queries'][0][:1], attention['keys'][0][:1]
      )
      maps_RHL.append(np.asarray(weight_BHQS[0].mean(axis=1)))
    figure = viz.attention_maps(
      shown_BHWC[0],
      np.stack(maps_RHL)[:, :, prefix:],
      layers=layers,
      grid=grid,
      title='Attention that each patch receives, by block and head',
    )
    return {'attention': figure}

  def load_pictures(self, task, params, model_state):
    model = self.config.model
    backbone = getattr(model, 'backbone', model)
    grid, prefix = (backbone.grid,) * 2, backbone.num_prefix
    with self.one_device(params, model_state) as variables:
      gated = self.gated(task, *variables, max_images=512)
    shown_BHWC = images_lib.denormalize(self.config.data, gated['image'])
    patches_BN = gated['share_BL'][:, prefix:]
    load_B = gated['load_B']
    labels = [self.classes[label] for label in gated['label']]
    spread = np.linspace(0, len(load_B) - 1, min(8, len(load_B))).astype(int)
    return {
      'load': viz.load_map(
        shown_BHWC[spread],
        patches_BN[spread],
        grid=grid,
        labels=[labels[i] for i in spread],
        unit='share of all learners',
        title='Where the compute goes',
      ),
      'compute': viz.compute_histogram(
        load_B,
        budget=task.objective.budget,
        title='Compute per held-out image',
      ),
      'extremes': viz.compute_extremes(
        shown_BHWC,
        load_B,
        patches_BN,
        grid=grid,
        labels=labels,
        title='The cheapest and the dearest images, by all of their tokens',
      ),
    }

  def gated(self, task, params, model_state, *, max_images: int = 0):
    """Runs the gates on held-out images, all or about `max_images` of them.

    Returns arrays by name: `image`, normalised; `label`; `right`, whether the
    prediction is correct; `share_BL`, each token's share of the cost of all
    learners; and `load_B`, each image's share of the cost of all learners that
    its tokens reach.
    """
    key = jax.random.key(self.config.seed)

    @jax.jit
    def run(params, model_state, batch):
      output = self.config.model.build().apply(
        {'params': params, **model_state}, batch['image'], rngs={'routing': key}
      )
      right_B = output.logits_BV.argmax(axis=-1) == batch['label']
      choices = stack_lib.collect(output.aux, 'adaptive')
      return right_B, task.share_per_token(choices), task.load_per_row(choices)

    names = ('image', 'label', 'right', 'share_BL', 'load_B')
    collected = {name: [] for name in names}
    size = self.config.evaluation.batch_size
    for batch in self.eval_batches(
      batch_size=size, num_batches=-(-max_images // size) or None
    ):
      gate_outputs = jax.device_get(run(params, model_state, batch))
      real_B = batch['weight'] > 0
      values = batch | dict(zip(names[2:], gate_outputs, strict=True))
      for name, parts in collected.items():
        parts.append(np.asarray(values[name])[real_B])
    return {name: np.concatenate(parts) for name, parts in collected.items()}

"""Image classification: batches, metrics, and the figures of an evaluation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import errors, losses, viz
from mod_jax.data import images as images_lib
from mod_jax.layers import lora
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.attention import attention_map
from mod_jax.layers.mode import Mode
from mod_jax.losses import classification
from mod_jax.losses.sums import Rows
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.studies import adaptive as adaptive_studies
from mod_jax.studies import confusion
from mod_jax.studies import images as studies
from mod_jax.studies.devices import one_device
from mod_jax.tasks import expert_pictures
from mod_jax.tasks.modality import ROWS
from mod_jax.tasks.vision import Vision

_PICTURED = 6  # Number of held-out images in the pictures.
_LOADED = 512  # Approximate number of images whose compute is drawn.


def _number(block: str) -> int:
  return int(block.removeprefix('block_'))


class Images(Vision):
  """Classification of images into one of several classes."""

  example = 'ImageDataConfig(source="folder", path="photos")'
  loss_unit = 'image'
  reader = images_lib
  columns = ('accuracy', 'top5', 'loss')
  main = ('loss', 'accuracy', 'top5')
  # A dense checkpoint fits a routed or pruned model, and vice versa.
  optional = (
    *(r'(block_\d+/)?router/.*', r'prediction_\d+/.*', r'pattern_\d+'),
    lora.PARAMETERS,
  )

  def __init__(self, config, workdir=None):
    super().__init__(config, workdir)
    self.multi_label = config.data.multi_label
    if self.multi_label:
      self.columns, self.main = ('mAP', 'loss'), ('loss', 'mAP')
      self.rising = ('mAP', 'ap/.*')
    else:
      self.rising = (*self._top_k, 'mean_recall')

  @property
  def _top_k(self) -> dict[str, int]:
    """The k of each top-k accuracy; no top-5 with fewer than 10 classes."""
    num_classes = self.config.model.num_classes
    ranks = {'accuracy': 1, 'top5': 5}
    return {name: k for name, k in ranks.items() if 2 * k <= num_classes}

  @functools.cached_property
  def classes(self):
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

  def data_summary(self):
    summary = super().data_summary()
    weight_V = self._class_weight_V
    if weight_V is not None:
      least, most = weight_V.argmin(), weight_V.argmax()
      summary += (
        f'; they weigh {weight_V[least]:.3g} ({self.classes[least]}) to'
        f' {weight_V[most]:.3g} ({self.classes[most]})'
      )
    if self.config.data.sampling == 'balanced':
      summary += '; each is drawn equally often'
    return summary

  def row_shapes(self):
    size = self.config.data.image_size
    return {
      'image': ((size, size, 3), 'float32'),
      'target': ((self.config.model.num_classes,), 'float32'),
    }

  def inputs(self, batch, *, train):
    return (batch['image'],), {}

  @property
  def _loss(self):
    if self.multi_label:
      return losses.multi_label_loss
    return losses.classification_loss

  @functools.cached_property
  def _class_weight_V(self):
    return images_lib.class_weights(self.config.data)

  def loss(self, output, batch):
    return self._loss(
      output.logits_BV, batch['target'], class_weight_V=self._class_weight_V
    )

  def held_out_loss(self, logits_V, label) -> jax.Array:
    """Returns the loss of one held-out image, in nats."""
    if not self.multi_label:
      label = jax.nn.one_hot(label, len(logits_V))
    return self._loss(logits_V[None], label[None])[0]

  def eval_sums(self, output, batch, mode):
    logits_BV, label_B = output.logits_BV, batch['label']
    weight_B = batch['weight']
    if self.multi_label:
      rows = {'label': label_B, 'score': logits_BV, 'weight': weight_B}
      return {
        'loss': self._loss(logits_BV, label_B, weight_B),
        ROWS: Rows((rows,)),
      }
    target_BV = jax.nn.one_hot(label_B, logits_BV.shape[-1])
    guess_B = logits_BV.argmax(axis=-1)
    rows = {'label': label_B, 'guess': guess_B, 'weight': weight_B}
    metric_sums = {
      'loss': self._loss(logits_BV, target_BV, weight_B),
      ROWS: Rows((rows,)),
    }
    for name, k in self._top_k.items():
      metric_sums[name] = losses.top_k_accuracy(logits_BV, label_B, k, weight_B)
    return metric_sums

  def of_rows(self, rows):
    """Returns the mean recall or, with `multi_label`, average precisions."""
    if self.multi_label:
      ap_V = classification.average_precision(rows['label'], rows['score'])
      named = zip(self.classes, ap_V, strict=True)
      # A class without a positive image has no average precision (NaN).
      aps = {f'ap/{name}': ap for name, ap in named if not np.isnan(ap)}
      return {'mAP': np.mean([*aps.values()]) if aps else np.nan} | aps
    matrix_VV = classification.confusion(
      rows['label'], rows['guess'], len(self.classes)
    )
    return {
      'mean_recall': np.nanmean(classification.precision_recall(matrix_VV)[1])
    }

  # Reports.

  def curves(self, records):
    what = 'mAP' if self.multi_label else 'accuracy'
    return viz.loss_curves(
      records,
      title=f'Loss and {what} over training',
      classifier=what,
      unit=self.loss_unit,
    )

  def studies(self):
    by_name = {
      'confusion': confusion.confusion,
      'throughput': studies.throughput,
    }
    model = self.config.model
    if self.multi_label:  # The other studies need one true class per image.
      return by_name
    if model.adaptive is not None:
      by_name['robustness'] = adaptive_studies.robustness
    # This study also runs the dense model with the weights of the routed one,
    # so the two may differ only in their routing.
    if model.routing is not None and model == dataclasses.replace(
      model.dense_twin(), routing=model.routing
    ):
      by_name['importance'] = studies.importance
    return by_name

  def named(self, label) -> str:
    """Returns a class's name or, with `multi_label`, the true labels' names."""
    if not self.multi_label:
      return self.classes[label]
    true = np.flatnonzero(label)
    return ', '.join(self.classes[v] for v in true) or 'no label'

  def caption(self, label, logits_V) -> str:
    """Returns an image's true class and, if it differs, the predicted one."""
    guess = logits_V > 0 if self.multi_label else logits_V.argmax()
    true, predicted = self.named(label), self.named(guess)
    if true == predicted:
      return true
    return f'true {true} → predicted {predicted}'

  @property
  def _backbone(self):
    """The config of the vision transformer, also within a pruned model."""
    return getattr(self.config.model, 'backbone', self.config.model)

  @property
  def _grid(self) -> tuple[int, int]:
    """Number of rows and of columns of patches."""
    return (self._backbone.grid,) * 2

  def look(self, task, params, model_state):
    """Returns images, their captions, the output, and the `intermediates`."""
    batch = self.examples(_PICTURED)
    output, state = task.on_examples(
      *(params, model_state, batch, Mode()), mutable='intermediates'
    )
    labels = [
      self.caption(label, logits_V)
      for label, logits_V in zip(batch['label'], output.logits_BV, strict=True)
    ]
    shown_BHWC = images_lib.denormalize(self.config.data, batch['image'])
    return shown_BHWC, labels, output, state.get('intermediates', {})

  def pictures(self, task, params, model_state):
    model, figures = self.config.model, {}
    pruned = isinstance(model, DynamicViTConfig)
    if pruned and model.score == 'structural':
      return {}
    with one_device(params, model_state) as variables:
      shown_BHWC, labels, output, intermediates = self.look(task, *variables)
      examples = shown_BHWC, labels, output
      if model.experts is not None:
        figures['expert_load'] = expert_pictures.load_picture(
          *(task, *variables, Mode()),
          'Held-out images: how many tokens each expert takes',
        )
        figures['expert_map'] = self._draw_experts(*examples)
      if model.routing is not None:
        figures['routing'] = self._draw_routing(*examples)
      if pruned:
        kept_SN, count = self._kept(task, *variables)
        return figures | self._draw_stages(*examples, kept_SN, count)
      if output.places:
        figures['merged'] = self._draw_merged(*examples)
      return figures | self._draw_attention(
        shown_BHWC[0], intermediates, output.places
      )

  def _draw_merged(self, shown_BHWC, labels, output):
    # A few blocks are enough to see how the tokens become fewer.
    names = list(output.places)
    spread = np.linspace(0, len(names) - 1, min(4, len(names)))
    names = [names[round(x)] for x in spread]
    place_RBL = np.stack([output.places[name] for name in names])
    return viz.merged_patches(
      shown_BHWC,
      place_RBL[..., self._backbone.num_prefix :],
      layers=[_number(name) for name in names],
      grid=self._grid,
      labels=labels,
      title='Which patches are one token after a block',
    )

  def _draw_routing(self, shown_BHWC, labels, output):
    model = self.config.model
    routed = model.routed_blocks
    chosen = []
    for i, routed_block in zip(routed, output.routing, strict=True):
      # `_left` marks the tokens that the block sees, equally many per image.
      chosen_BL = np.zeros((len(labels), model.num_tokens), bool)
      chosen_BL[self._left(output, i)] = np.ravel(routed_block.chosen_BL)
      chosen.append(chosen_BL)
    return viz.patch_maps(
      shown_BHWC,
      np.stack(chosen)[:, :, self._backbone.num_prefix :],
      layers=routed,
      grid=self._grid,
      num_layers=self._backbone.num_layers,
      labels=labels,
      title='Which patches each routed block processes',
    )

  def _left(self, output, block):
    """Returns left_BL: whether each token of each image reaches a block."""
    model = self.config.model
    left_BL = np.ones((len(output.logits_BV), model.num_tokens), bool)
    for s, stage in enumerate(getattr(model, 'stages', ())):
      if stage <= block:
        left_BL[:, self._backbone.num_prefix :] = output.keep_SBN[s] > 0
    return left_BL

  def _draw_experts(self, shown_BHWC, labels, output):
    model = self.config.model
    expert_RBL, more_RBL, _ = expert_pictures.takers(
      output.experts, model.num_tokens
    )
    patches = np.s_[..., self._backbone.num_prefix :]
    return viz.expert_patches(
      shown_BHWC,
      expert_RBL[patches],
      layers=expert_pictures.blocks(model),
      grid=self._grid,
      num_experts=model.experts.num_experts,
      more_RBL=more_RBL[patches],
      num_layers=self._backbone.num_layers,
      labels=labels,
      title='Which expert takes which patch',
    )

  def _kept(self, task, params, model_state):
    """Returns kept_SN, and the number of held-out images that it counts.

    kept_SN is the fraction of these images in which stage S keeps patch N.
    """
    total_SN, count = 0.0, 0
    for batch, kept_SN in task.over_held_out(
      lambda output, batch: jnp.einsum(
        'SBN,B->SN', output.keep_SBN, batch['weight']
      ),
      *(params, model_state, self.config.evaluation.final_batches),
    ):
      total_SN += kept_SN
      count += int(batch['weight'].sum())
    return total_SN / max(count, 1), count

  def _draw_stages(self, shown_BHWC, labels, output, kept_SN, count):
    """Draws the patches that each stage keeps, and how often it keeps them."""
    kwargs = {'grid': self._grid, 'blocks': self.config.model.stages}
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

  def _draw_attention(self, image_HWC, intermediates, places):
    model = self.config.model
    routed = model.routed_blocks
    # Draw the attention of the dense blocks just before routed blocks, since a
    # routed block may choose its tokens by that attention. Without such blocks,
    # draw a few dense ones. The attention of routed blocks lacks most tokens.
    dense = [i for i in range(model.num_layers) if i not in routed]
    layers = [i for i in dense if i + 1 in routed]
    if not layers:
      spread = np.linspace(0, len(dense) - 1, min(4, len(dense)))
      layers = [dense[round(x)] for x in spread]
    if not layers:
      return {}
    maps_RHL = []
    for layer in layers:
      attention = intermediates[f'block_{layer}']['attention']
      weight_BHQS = attention_map(
        attention['queries'][0][:1], attention['keys'][0][:1]
      )
      if 'sizes' in attention:  # Weigh a token by the patches merged into it.
        weight_BHQS *= attention['sizes'][0][:1, None, None]
        weight_BHQS /= weight_BHQS.sum(axis=-1, keepdims=True)
      map_HL = np.asarray(weight_BHQS[0].mean(axis=1))
      # Each merged patch shows the attention that its token receives.
      before = [places[name] for name in places if _number(name) < layer]
      maps_RHL.append(map_HL[:, before[-1][0]] if before else map_HL)
    figure = viz.attention_maps(
      image_HWC,
      np.stack(maps_RHL)[:, :, model.num_prefix :],
      layers=layers,
      grid=self._grid,
      title='Attention that each patch receives, by block and head',
    )
    return {'attention': figure}

  def load_pictures(self, task, params, model_state):
    def loads(output, batch):
      choices = stack_lib.collect(output.aux, 'adaptive')
      return task.share_per_token(choices), task.load_per_row(choices)

    batches = -(-_LOADED // self.config.evaluation.batch_size)
    columns = []
    with one_device(params, model_state) as variables:
      for batch, values in task.over_held_out(loads, *variables, batches):
        real_B = batch['weight'] > 0
        values = (batch['image'], batch['label'], *values)
        columns.append([x[real_B] for x in values])
    image_BHWC, label_B, share_BL, load_B = map(
      np.concatenate, zip(*columns, strict=True)
    )
    shown_BHWC = images_lib.denormalize(self.config.data, image_BHWC)
    patches_BN = share_BL[:, self._backbone.num_prefix :]
    labels = [self.named(label) for label in label_B]
    spread = np.linspace(0, len(load_B) - 1, min(8, len(load_B))).astype(int)
    return {
      'load': viz.load_map(
        shown_BHWC[spread],
        patches_BN[spread],
        grid=self._grid,
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
        grid=self._grid,
        labels=labels,
        title='The cheapest and the dearest images, by all of their tokens',
      ),
    }

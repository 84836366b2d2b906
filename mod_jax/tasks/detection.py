"""Detection of objects: sets of classes and boxes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import errors, viz
from mod_jax.convert import detr as convert_detr
from mod_jax.data import detection as data_lib
from mod_jax.data import images as images_lib
from mod_jax.data.coco import of_crowd
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.mode import Mode
from mod_jax.losses import detection, mean_precision, sums
from mod_jax.losses.mean_precision import Boxes
from mod_jax.losses.sums import Rows
from mod_jax.tasks.modality import ROWS
from mod_jax.tasks.vision import Vision

_PICTURED = 4  # Number of held-out pictures that are drawn.
LEAST_SCORE = 0.5  # Minimum score of the boxes that are drawn.


class Detection(Vision):
  """Detection of objects in pictures by a DETR."""

  example = 'DetectionDataConfig(source="coco", path="coco")'
  reader = data_lib
  columns = ('mAP', 'mAP50', 'loss')
  main = ('loss', 'mAP', 'mAP50')
  rising = ('mAP', 'mAP50', 'ap/.*')
  # A dense checkpoint fits a routed model, and vice versa.
  optional = convert_detr.ROUTING

  @functools.cached_property
  def classes(self):
    return data_lib.open_split(self.config.data, 'train').class_names

  def check(self):
    model, data = self.config.model, self.config.data
    count = len(self.classes)
    if model.num_classes < count:
      raise errors.UserError(
        f'model.num_classes={model.num_classes}, but the data have classes'
        f' numbered up to {count - 1}: set model.num_classes={count}.'
      )
    if data.most > model.num_queries:
      raise errors.UserError(
        f'data.most={data.most} objects and model.num_queries='
        f'{model.num_queries}: each object needs a query of its own; raise'
        ' num_queries or lower most.'
      )

  def row_shapes(self):
    most = self.config.data.most
    return {
      'image': ((*self.config.data.image_size, 3), 'float32'),
      'size': ((2,), 'int32'),
      'label': ((most,), 'int32'),
      'box': ((most, 4), 'float32'),
    }

  def inputs(self, batch, *, train):
    if self.config.data.pads:
      return (batch['image'], batch['size']), {}
    return (batch['image'],), {}

  def loss(self, output, batch):
    return self.losses(output, batch)[1]['loss']

  def losses(self, output, batch):
    """Returns the loss's terms, and their sum to report as `loss`.

    Each term is a mean over its own number of items; the reported sum is
    weighted by the rows of the batch.
    """
    target = batch['label'], batch['box']
    weight = self.config.model.class_weight
    pairs = detection.set_losses(
      output.logits_BQV, output.boxes_BQ4, *target
    ).weighted(weight)
    if output.earlier is not None:
      pairs += detection.earlier_losses(*output.earlier, *target, weight)
    rows = jnp.float32(len(batch['label']))
    return pairs, {'loss': (sums.sum_of_means(pairs) * rows, rows)}

  def eval_sums(self, output, batch, mode):
    del mode
    weight_B = batch['weight']
    found = detection.set_losses(
      *(output.logits_BQV, output.boxes_BQ4, batch['label'], batch['box']),
      weight_B,
    )
    probability_BQV = jax.nn.softmax(output.logits_BQV)[..., :-1]
    rows = {
      'score': probability_BQV.max(axis=-1),
      'guess': probability_BQV.argmax(axis=-1),
      'found': output.boxes_BQ4,
      **{name: batch[name] for name in ('label', 'box', 'weight')},
    }
    pairs = found.weighted(self.config.model.class_weight)
    loss = tuple(map(jnp.stack, zip(*pairs, strict=True)))
    return {'loss': loss, ROWS: Rows((rows,))}

  def of_rows(self, rows):
    """Returns mean average precisions, and each class's as `ap/<class>`."""
    found = map(Boxes, rows['guess'], rows['found'], rows['score'])
    # No class is negative: padding and crowds are no objects, and padding and
    # objects no crowds.
    there = map(Boxes, rows['label'], rows['box'])
    crowds = map(Boxes, of_crowd(rows['label']), rows['box'])
    ap_VJ = mean_precision.average_precisions(
      *map(list, (found, there, crowds)), len(self.classes)
    )
    there_V = ~np.isnan(ap_VJ[:, 0])
    # The means are NaN if the held-out data have no objects at all.
    mean_J = ap_VJ[there_V].mean(axis=0) if there_V.any() else ap_VJ[0]
    return {'mAP': mean_J.mean(), 'mAP50': mean_J[0]} | {
      f'ap/{self.classes[v]}': ap_VJ[v].mean() for v in np.flatnonzero(there_V)
    }

  def modes(self, *, more=False):
    return {} if more else {'': Mode()}

  # Reports.

  def summary(self, task, metrics):
    note = 'mAP: mean average precision over overlaps of .50 to .95; mAP50: at'
    return f'{super().summary(task, metrics)}\n{note} .50.'

  def pictures(self, task, params, model_state):
    batch = self.examples(_PICTURED)
    output = task.on_examples(params, model_state, batch, Mode())
    shown_BHWC = images_lib.denormalize(self.config.data, batch['image'])
    return draw(
      self.config.model, output, shown_BHWC, batch['size'], self.classes
    )


def draw(
  model, output, shown_BHWC, size_B2, classes, least: float = LEAST_SCORE
):
  """Returns a figure, by name, of images with the boxes that were found.

  The figure of a routed model also shows the tokens that its blocks process.
  `shown_BHWC` are padded uint8 images, and `size_B2` are their heights and
  widths without padding. Boxes with a score of at least `least` are drawn.
  """
  found = [
    boxes_of(*x, classes, size, least)
    for *x, size in zip(
      output.logits_BQV, output.boxes_BQ4, size_B2, strict=True
    )
  ]
  routers = stack_lib.collect(output.aux, 'router')
  chosen = {
    f'encoder {i}': routers[f'block_{i}']
    for i in range(model.num_layers)
    if f'block_{i}' in routers
  } | {
    f'memory, decoder {int(name.split("_")[1]) - model.num_layers}': x
    for name, x in stack_lib.collect(output.aux, 'source_router').items()
  }
  masks = {name: np.asarray(x.chosen_BL) for name, x in chosen.items()}
  return {'boxes': viz.boxes(shown_BHWC, found, masks, grid=model.grid)}


def boxes_of(logits_QV, boxes_Q4, classes, size, least: float):
  """Returns an image's detections with a score of at least `least`.

  They are [(class name, score, (left, top, right, bottom) in pixels)], best
  first. `size` is (height, width). A class that `classes` does not name, or any
  class if `classes` is None, is named by its number.
  """
  p_QV = np.asarray(jax.nn.softmax(jnp.asarray(logits_QV)))[:, :-1]
  score_Q, label_Q = p_QV.max(axis=-1), p_QV.argmax(axis=-1)
  corner_Q4 = np.asarray(detection.corners(jnp.asarray(boxes_Q4)))
  corner_Q4 = np.clip(corner_Q4, 0, 1) * np.array([size[1], size[0]] * 2)

  def name(label):
    known = classes is not None and label < len(classes) and classes[label]
    return classes[label] if known else str(label)

  return [
    (name(int(label_Q[q])), float(score_Q[q]), tuple(corner_Q4[q].tolist()))
    for q in np.argsort(-score_Q, kind='stable')
    if score_Q[q] >= least
  ]

"""DETR's set prediction: matching objects to queries, and the losses.

Carion et al. 2020, sections 3.1 and A.2. Boxes are centre x, centre y, width
and height as fractions of the picture. Targets are padded: `label_BT` is
negative where there is no object.
"""

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mod_jax.losses.sums import Pair

# Weights of the terms, both in the cost of a match and in the loss.
_L1, _GIOU, _CLASS = 5.0, 2.0, 1.0
_NO_OBJECT = 0.1  # Weight of the class "no object" in the cross-entropy.
_LARGEST = 1e6  # Replaces costs that are not finite.


def corners(box: jax.Array) -> jax.Array:
  """Returns left, top, right, bottom of boxes [..., 4]."""
  centre, size = box[..., :2], box[..., 2:]
  return jnp.concatenate([centre - size / 2, centre + size / 2], axis=-1)


def iou(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the intersection over union of boxes, and its generalised form.

  The shapes [..., 4] are broadcast. The generalised form (Rezatofighi et al.
  2019) lies between -1 and 1, and has a gradient where boxes do not overlap.
  """
  a, b = corners(a), corners(b)

  def area(box):
    side = jnp.maximum(box[..., 2:] - box[..., :2], 0)
    return side[..., 0] * side[..., 1]

  def within(low, high):
    return area(
      jnp.concatenate(
        [low(a[..., :2], b[..., :2]), high(a[..., 2:], b[..., 2:])], axis=-1
      )
    )

  shared = within(jnp.maximum, jnp.minimum)
  hull = within(jnp.minimum, jnp.maximum)
  union = area(a) + area(b) - shared
  tiny = 1e-9  # Boxes may have no area.
  ratio = shared / jnp.maximum(union, tiny)
  return ratio, ratio - (hull - union) / jnp.maximum(hull, tiny)


def match(
  logits_BQV: jax.Array,
  boxes_BQ4: jax.Array,
  label_BT: jax.Array,
  target_BT4: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the cheapest assignment of targets to different queries.

  The cost of a pair is `5·L1 + 2·(-GIoU) - probability of the class`. It has no
  gradient. There are at most as many targets as queries, T <= Q.

  Args:
    logits_BQV: float32 logits of the classes; the last is "no object".
    boxes_BQ4: predicted boxes.
    label_BT: int32 classes; negative for padding.
    target_BT4: true boxes; any finite numbers at padding.

  Returns:
    query_BT: int32 query of each target, all different. Padding gets queries
      that no object has.
    real_BT: False for padding.
  """
  real_BT = label_BT >= 0
  probability_BQV = jax.nn.softmax(logits_BQV, axis=-1)
  of_class_BQT = jnp.take_along_axis(
    probability_BQV, jnp.maximum(label_BT, 0)[:, None], axis=-1
  )
  pair = boxes_BQ4[:, :, None], target_BT4[:, None]
  cost_BQT = (
    _L1 * jnp.abs(pair[0] - pair[1]).sum(axis=-1)
    - _GIOU * iou(*pair)[1]
    - _CLASS * of_class_BQT
  )
  # With NaN, the solver would return a wrong assignment without an error.
  cost_BQT = jnp.where(jnp.isfinite(cost_BQT), cost_BQT, _LARGEST)
  # The same cost for all padding does not affect the best match of the objects.
  cost_BQT = jnp.where(real_BT[:, None], cost_BQT, 0.0)
  cost_BQT = jax.lax.stop_gradient(cost_BQT)
  query_BN, target_BN = jax.vmap(optax.assignment.hungarian_algorithm)(cost_BQT)
  order_BN = jnp.argsort(target_BN, axis=-1)
  return jnp.take_along_axis(query_BN, order_BN, axis=-1), real_BT


@flax.struct.dataclass
class SetLosses:
  """The terms of the loss; each is a mean, as a pair (total, weight).

  Attributes:
    classes: cross-entropy over queries, divided by the sum of class weights.
    l1: L1 distance of matched boxes, divided by the number of objects.
    giou: 1 - GIoU of matched boxes, divided by the number of objects.
  """

  classes: Pair
  l1: Pair
  giou: Pair

  def weighted(self, class_weight: float = _CLASS) -> list[Pair]:
    """Returns the terms, each total multiplied by the term's loss weight."""
    return [
      (weight * total, count)
      for weight, (total, count) in (
        (class_weight, self.classes),
        (_L1, self.l1),
        (_GIOU, self.giou),
      )
    ]


def set_losses(
  logits_BQV: jax.Array,
  boxes_BQ4: jax.Array,
  label_BT: jax.Array,
  target_BT4: jax.Array,
  weight_B: jax.Array | None = None,
) -> SetLosses:
  """Returns the losses of predicted sets; arguments are those of `match`.

  `weight_B` is 0 for pictures that do not count; with None, all count.
  """
  if weight_B is None:
    weight_B = jnp.ones(len(logits_BQV))
  query_BT, real_BT = match(logits_BQV, boxes_BQ4, label_BT, target_BT4)
  none = logits_BQV.shape[-1] - 1
  wanted_BT = jnp.where(real_BT, label_BT, none)
  wanted_BQ = jax.vmap(
    lambda q, v: jnp.full(boxes_BQ4.shape[1], none).at[q].set(v)
  )(query_BT, wanted_BT)
  log_p_BQV = jax.nn.log_softmax(logits_BQV, axis=-1)
  log_p_BQ = jnp.take_along_axis(log_p_BQV, wanted_BQ[..., None], -1)[..., 0]
  of_class_BQ = jnp.where(wanted_BQ == none, _NO_OBJECT, 1) * weight_B[:, None]
  matched_BT4 = jnp.take_along_axis(boxes_BQ4, query_BT[..., None], axis=1)
  counts_BT = real_BT * weight_B[:, None]
  # The boxes of padding may be any numbers; `where` masks their terms below.
  distance_BT = jnp.abs(matched_BT4 - target_BT4).sum(axis=-1)
  giou_BT = iou(matched_BT4, target_BT4)[1]
  count = counts_BT.sum()
  queries = boxes_BQ4.shape[1] * weight_B.sum()
  # The sum of `of_class_BQ`, from counts: so a batch's weight is known without
  # its matches.
  weight = count + _NO_OBJECT * (queries - count)
  return SetLosses(
    classes=(-(log_p_BQ * of_class_BQ).sum(), weight),
    l1=(jnp.where(real_BT, distance_BT * counts_BT, 0).sum(), count),
    giou=(jnp.where(real_BT, (1 - giou_BT) * counts_BT, 0).sum(), count),
  )


def earlier_losses(
  logits_BNQV: jax.Array,
  boxes_BNQ4: jax.Array,
  label_BT: jax.Array,
  target_BT4: jax.Array,
  class_weight: float = _CLASS,
) -> list[Pair]:
  """Returns the weighted losses of the N decoder layers before the last.

  Each layer has matches of its own; all layers are matched as one batch.
  """
  layers = logits_BNQV.shape[1]

  def flat(x):
    return x.reshape(-1, *x.shape[2:])

  found = set_losses(
    flat(logits_BNQV),
    flat(boxes_BNQ4),
    jnp.repeat(label_BT, layers, axis=0),
    jnp.repeat(target_BT4, layers, axis=0),
  )
  # N times the mean over all layers is the sum of the layers' means, because
  # all layers have the same number of objects. Each layer matches one query to
  # each object, so the sums of class weights are the same, too.
  return [
    (layers * total, count) for total, count in found.weighted(class_weight)
  ]

"""DETR's matching against SciPy, and the losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from mod_jax.losses import detection, sums

B, Q, T, V = 4, 9, 5, 3


def drawn(seed, targets=T, real=(5, 3, 1, 0)):
  generator = np.random.default_rng(seed)

  def boxes(count):
    return np.float32(
      np.concatenate(
        [
          generator.uniform(0.2, 0.8, (B, count, 2)),
          generator.uniform(0.05, 0.4, (B, count, 2)),
        ],
        axis=-1,
      )
    )

  label_BT = generator.integers(0, V, (B, targets)).astype(np.int32)
  label_BT[np.arange(targets) >= np.array(real)[:, None]] = -1
  logits = np.float32(2 * generator.normal(size=(B, Q, V + 1)))
  return logits, boxes(Q), label_BT, boxes(targets)


def iou_oracle(a, b):
  """Generalised IoU of two boxes in plain Python."""
  ax0, ay0, ax1, ay1 = a[0] - a[2] / 2, a[1] - a[3] / 2, *(a[:2] + a[2:] / 2)
  bx0, by0, bx1, by1 = b[0] - b[2] / 2, b[1] - b[3] / 2, *(b[:2] + b[2:] / 2)
  shared = max(0, min(ax1, bx1) - max(ax0, bx0)) * max(
    0, min(ay1, by1) - max(ay0, by0)
  )
  union = a[2] * a[3] + b[2] * b[3] - shared
  hull = (max(ax1, bx1) - min(ax0, bx0)) * (max(ay1, by1) - min(ay0, by0))
  return shared / union, shared / union - (hull - union) / hull


def cost_oracle(logits_QV, boxes_Q4, label_T, target_T4):
  p_QV = np.exp(logits_QV) / np.exp(logits_QV).sum(axis=-1, keepdims=True)
  return np.array(
    [
      [
        5 * np.abs(box - target).sum()
        - 2 * iou_oracle(box, target)[1]
        - p_V[label]
        for label, target in zip(label_T, target_T4, strict=True)
      ]
      for p_V, box in zip(p_QV, boxes_Q4, strict=True)
    ]
  ).reshape(len(boxes_Q4), -1)


match = jax.jit(detection.match)
set_losses = jax.jit(detection.set_losses)


@pytest.mark.parametrize(
  ('seed', 'targets', 'real'),
  [(0, T, (5, 3, 1, 0)), (1, Q, (9, 4, 8, 0))],
  ids=['fewer', 'as many as queries'],
)
def test_matches_are_those_of_scipy(seed, targets, real):
  arrays = drawn(seed, targets, real)
  query_BT, real_BT = match(*arrays)
  assert real_BT.sum(axis=1).tolist() == list(real)
  for i, count in enumerate(real):
    logits, boxes, label, target = (x[i] for x in arrays)
    cost_QT = cost_oracle(logits, boxes, label[:count], target[:count])
    rows, columns = linear_sum_assignment(cost_QT)
    found = np.asarray(query_BT[i, :count])
    assert found[columns].tolist() == rows.tolist()
    assert len(set(query_BT[i].tolist())) == targets


def test_what_is_not_finite_is_matched_last():
  logits, boxes, label, target = drawn(2)
  best = np.asarray(match(logits, boxes, label, target)[0])
  boxes[0, best[0, 0]] = np.nan
  query_BT, _ = match(logits, boxes, label, target)
  assert best[0, 0] not in query_BT[0].tolist()
  np.testing.assert_array_equal(query_BT[1:], best[1:])


def test_iou():
  generator = np.random.default_rng(3)
  a, b = np.float32(generator.uniform(0.1, 0.6, (2, 50, 4)))
  found = np.stack(detection.iou(a, b))
  wanted = np.array([iou_oracle(*x) for x in zip(a, b, strict=True)]).T
  np.testing.assert_allclose(found, wanted, atol=1e-5)
  assert (wanted[0] > 0).any()
  assert (wanted[1] < 0).any()
  # Points, of which the hull is no area either.
  nothing = jnp.array([0.5, 0.5, 0, 0])
  gradient = jax.grad(lambda x: detection.iou(x, nothing)[1])(nothing)
  assert jnp.isfinite(gradient).all()


def test_losses_against_numpy():
  arrays = drawn(4)
  found = set_losses(*arrays)
  query_BT, _ = match(*arrays)
  logits, boxes, label, target = arrays
  log_p = np.asarray(jax.nn.log_softmax(logits))
  classes = weights = l1 = giou = 0.0
  for i in range(B):
    by_query = {
      int(q): t for t, q in enumerate(query_BT[i]) if label[i, t] >= 0
    }
    for q in range(Q):
      t = by_query.get(q)
      weight = 0.1 if t is None else 1.0
      classes -= weight * log_p[i, q, V if t is None else label[i, t]]
      weights += weight
      if t is not None:
        l1 += np.abs(boxes[i, q] - target[i, t]).sum()
        giou += 1 - iou_oracle(boxes[i, q], target[i, t])[1]
  for pair, total, count in (
    (found.classes, classes, weights),
    (found.l1, l1, 9),
    (found.giou, giou, 9),
  ):
    np.testing.assert_allclose(pair, (total, count), rtol=1e-5)


def test_pictures_without_objects():
  logits, boxes, label, target = drawn(6, real=(0, 0, 0, 0))

  @jax.jit
  @jax.value_and_grad
  def loss(boxes):
    found = detection.set_losses(logits, boxes, label, target)
    return sums.sum_of_means(found.weighted())

  value, gradient = loss(boxes)
  assert value > 0
  assert (gradient == 0).all()


def test_pictures_of_weight_zero():
  logits, boxes, label, target = drawn(7)
  weight_B = np.float32([1, 1, 0, 0])
  found = set_losses(logits, boxes, label, target, weight_B)
  wanted = set_losses(*(x[:2] for x in (logits, boxes, label, target)))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted
  )


def test_earlier_layers_are_matched_each_for_itself():
  """In one batch: the sum of what each layer's losses are alone."""
  (logits, boxes, label, target), (others, elsewhere, _, _) = drawn(8), drawn(9)
  assert not np.array_equal(
    match(logits, boxes, label, target)[0],
    match(others, elsewhere, label, target)[0],
  )
  found = jax.jit(detection.earlier_losses)(
    np.stack([logits, others], axis=1),
    np.stack([boxes, elsewhere], axis=1),
    *(label, target, 3.0),
  )
  alone = [
    set_losses(*x, label, target).weighted(3.0)
    for x in ((logits, boxes), (others, elsewhere))
  ]
  for pair, *pairs in zip(found, *alone, strict=True):
    wanted = sum(total / count for total, count in pairs)
    np.testing.assert_allclose(pair[0] / pair[1], wanted, rtol=1e-5)

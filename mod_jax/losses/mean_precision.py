"""Mean average precision of detected boxes, as COCO computes it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Overlaps (intersection over union) from which a box counts as found, and
# points of recall at which the precision is read.
THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
_MOST = 100  # Detections of a class that count in a picture, the best first.


class Boxes(NamedTuple):
  """Boxes in a picture: detections with scores, or true boxes.

  Attributes:
    label_N: int classes.
    box_N4: centre x, centre y, width, height, in any unit for each axis.
    score_N: float scores of detections; None for true boxes.
  """

  label_N: np.ndarray
  box_N4: np.ndarray
  score_N: np.ndarray | None = None


def average_precisions(
  found: Sequence[Boxes],
  there: Sequence[Boxes],
  crowds: Sequence[Boxes],
  num_classes: int,
) -> np.ndarray:
  """Returns the average precision ap_VJ of classes at the J `THRESHOLDS`.

  `found` has the detections of each picture, `there` the true boxes of single
  objects, and `crowds` those of crowds: a detection in a crowd that finds no
  single object is neither right nor wrong. Precision is interpolated at 101
  points of recall; a class without single objects has NaN. The result equals
  the mean over recall of pycocotools' `precision` for all areas and 100
  detections.
  """
  ap_VJ = np.full((num_classes, len(THRESHOLDS)), np.nan)
  for label in range(num_classes):
    scores, hits, ignored, total = [], [], [], 0
    for of_found, *true in zip(found, there, crowds, strict=True):
      real_T4, crowd_C4 = (x.box_N4[x.label_N == label] for x in true)
      mine = of_found.label_N == label
      order = np.argsort(-of_found.score_N[mine], kind='stable')[:_MOST]
      box_N4 = of_found.box_N4[mine][order]
      scores.append(of_found.score_N[mine][order])
      hits.append(_hits(box_N4, real_T4))
      ignored.append(_in_crowds(box_N4, crowd_C4))
      total += len(real_T4)
    if total:
      order = np.argsort(-np.concatenate(scores), kind='stable')
      hit_NJ, ignored_NJ = (np.concatenate(x)[order] for x in (hits, ignored))
      ap_VJ[label] = _precision(hit_NJ, ~hit_NJ & ~ignored_NJ, total)
  return ap_VJ


def _hits(box_N4, real_T4) -> np.ndarray:
  """Returns hit_NJ: whether box n, best first, finds a new true box."""
  hit_NJ = np.zeros((len(box_N4), len(THRESHOLDS)), bool)
  if not len(box_N4) or not len(real_T4):
    return hit_NJ
  overlap_NT = _overlaps(box_N4, real_T4)
  for j, threshold in enumerate(THRESHOLDS):
    left_T = np.ones(len(real_T4), bool)
    for n, overlap_T in enumerate(overlap_NT):
      candidate_T = np.where(left_T, overlap_T, -1)
      # Among equally good boxes take the last, as COCO's code does.
      best = len(candidate_T) - 1 - candidate_T[::-1].argmax()
      if candidate_T[best] >= threshold:
        left_T[best] = False
        hit_NJ[n, j] = True
  return hit_NJ


def _in_crowds(box_N4, crowd_C4) -> np.ndarray:
  """Returns inside_NJ: whether enough of box n's area lies in some crowd."""
  covered_NC = _overlaps(box_N4, crowd_C4, of_first=True)
  return covered_NC.max(axis=-1, initial=0)[:, None] >= THRESHOLDS


def _overlaps(a_N4, b_T4, *, of_first: bool = False) -> np.ndarray:
  """Returns the intersection over union of all pairs, [N, T].

  With `of_first`, it is the intersection over the area of the first box.
  """
  a_N4, b_T4 = np.float64(a_N4), np.float64(b_T4)
  low_NT2, high_NT2 = (
    bound(
      (a_N4[:, None, :2] + sign * a_N4[:, None, 2:] / 2),
      (b_T4[:, :2] + sign * b_T4[:, 2:] / 2),
    )
    for bound, sign in ((np.maximum, -1), (np.minimum, 1))
  )
  shared_NT = np.maximum(high_NT2 - low_NT2, 0).prod(axis=-1)
  area_N1, area_T = a_N4[:, None, 2:].prod(axis=-1), b_T4[:, 2:].prod(axis=-1)
  whole_NT = area_N1 if of_first else area_N1 + area_T - shared_NT
  return shared_NT / np.maximum(whole_NT, 1e-12)


def _precision(hit_NJ, wrong_NJ, total: int) -> np.ndarray:
  """Returns precision_J, the mean precision over the points of recall."""
  true_NJ, false_NJ = hit_NJ.cumsum(axis=0), wrong_NJ.cumsum(axis=0)
  recall_NJ = true_NJ / total
  precision_NJ = true_NJ / np.maximum(true_NJ + false_NJ, 1)
  # The best precision at this or a higher recall.
  precision_NJ = np.maximum.accumulate(precision_NJ[::-1], axis=0)[::-1]
  means_J = []
  for j in range(len(THRESHOLDS)):
    index = np.searchsorted(recall_NJ[:, j], _RECALLS, side='left')
    padded = np.append(precision_NJ[:, j], 0.0)
    means_J.append(padded[index].mean())
  return np.array(means_J)

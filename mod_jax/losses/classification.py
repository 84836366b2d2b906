"""Metrics of a classifier on all held-out images at once, in NumPy."""

import numpy as np


def confusion(label_N, guess_N, num_classes: int) -> np.ndarray:
  """Returns count_VV: numbers of images by class (row) and prediction (column).

  `label_N` and `guess_N` are the indices of the true and the predicted classes.
  """
  pairs_N = np.asarray(label_N) * num_classes + np.asarray(guess_N)
  counts = np.bincount(pairs_N, minlength=num_classes**2)
  return counts.reshape(num_classes, num_classes)


def precision_recall(matrix_VV) -> tuple[np.ndarray, np.ndarray]:
  """Returns precision_V and recall_V, given the counts of `confusion`.

  Classes that are never predicted have precision NaN; classes without an image
  have recall NaN. The mean of the recalls is the balanced accuracy.
  """
  hits_V = np.diagonal(matrix_VV)
  with np.errstate(invalid='ignore'):
    return hits_V / matrix_VV.sum(axis=0), hits_V / matrix_VV.sum(axis=1)


def average_precision(label_NV, score_NV) -> np.ndarray:
  """Returns ap_V: each label's average precision, NaN if it is never true.

  Scikit-learn's `average_precision_score` computes it: the mean over ranks of
  the precision down to that rank, weighted by the rise of the recall. NaN
  scores rank last.
  """
  # Imported here, since it is slow to import and other tasks do not need it.
  from sklearn import metrics

  score_NV = np.nan_to_num(score_NV, nan=-np.inf, posinf=np.inf)
  score_NV = np.maximum(score_NV, np.finfo(np.float32).min)
  label_NV = np.asarray(label_NV) > 0
  return np.array(
    [
      metrics.average_precision_score(label_N, score_N)
      if label_N.any()
      else np.nan
      for label_N, score_N in zip(label_NV.T, score_NV.T, strict=True)
    ]
  )

"""Metrics of classifiers against counting by hand and scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics

from mod_jax.losses import classification

pytestmark = pytest.mark.filterwarnings('error')


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def test_counts_precision_and_recall(rng):
  label_N, guess_N = rng.integers(0, 4, (2, 60))
  matrix_VV = classification.confusion(label_N, guess_N, 4)
  np.testing.assert_array_equal(
    matrix_VV, metrics.confusion_matrix(label_N, guess_N)
  )
  precision_V, recall_V = classification.precision_recall(matrix_VV)
  kwargs = {'average': None}
  np.testing.assert_allclose(
    precision_V, metrics.precision_score(label_N, guess_N, **kwargs)
  )
  np.testing.assert_allclose(
    recall_V, metrics.recall_score(label_N, guess_N, **kwargs)
  )
  assert np.mean(recall_V) == pytest.approx(
    metrics.balanced_accuracy_score(label_N, guess_N)
  )


def test_classes_without_images_or_predictions_have_no_number():
  matrix_VV = classification.confusion([0, 0, 1], [0, 2, 0], 4)
  precision_V, recall_V = classification.precision_recall(matrix_VV)
  np.testing.assert_array_equal(precision_V, [0.5, np.nan, 0, np.nan])
  np.testing.assert_array_equal(recall_V, [0.5, 0, np.nan, np.nan])


def test_average_precision():
  label_N2 = np.array([[1, 0], [0, 0], [1, 0], [0, 0]])
  score_N2 = np.array([[0.9, 1], [0.8, 2], [0.7, 3], [0.1, 4]])
  ap_V = classification.average_precision(label_N2, score_N2)
  # True ones stand first and third: precisions 1 and 2/3 at halves of recall.
  np.testing.assert_allclose(ap_V, [(1 + 2 / 3) / 2, np.nan])


def test_scores_that_are_no_numbers_rank_last():
  label_N1 = np.array([[1], [0], [0]])
  (worst,) = classification.average_precision(
    label_N1, np.array([[np.nan], [-9.0], [1.0]])
  )
  (last,) = classification.average_precision(
    label_N1, np.array([[-1e9], [-9.0], [1.0]])
  )
  assert worst == last == pytest.approx(1 / 3)

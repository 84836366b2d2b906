"""The matrix of confusions and the worst pictures show the given numbers."""

import numpy as np
import pytest

from mod_jax import viz

pytestmark = pytest.mark.filterwarnings('error')


def test_a_cell_has_its_count_and_the_colour_of_its_share(seen):
  count_VV = np.array([[8, 2, 0], [0, 0, 0], [1, 1, 2]])
  figure = viz.confusion_matrix(count_VV, ['cat', '$dog$', 'emu'])
  (axes,) = seen.axes(figure, 'matrix')
  (image,) = axes.images
  np.testing.assert_allclose(
    image.get_array(), [[0.8, 0.2, 0], [0, 0, 0], [0.25, 0.25, 0.5]]
  )
  assert seen.ticks(axes.yaxis) == ['cat (10)', r'\$dog\$ (0)', 'emu (4)']
  assert seen.ticks(axes.xaxis) == ['cat', r'\$dog\$', 'emu']
  counts = {
    text.get_position(): text.get_text() for text in seen.marks(axes, 'count')
  }
  # Predicted classes from left to right; empty cells are left empty.
  assert counts == {
    (0, 0): '8',
    (1, 0): '2',
    (0, 2): '1',
    (1, 2): '1',
    (2, 2): '2',
  }
  assert 'Images: 14' in seen.words(figure)


def test_of_many_classes_the_worst_stand_apart(rng, seen):
  count_VV = np.diag(rng.integers(1, 9, 100))
  count_VV[70, 3], count_VV[5, 70], count_VV[4, 6] = 50, 30, 40
  figure = viz.confusion_matrix(count_VV, [f'c{v}' for v in range(100)])
  (axes,) = seen.axes(figure, 'matrix')
  names = seen.ticks(axes.xaxis)
  assert names[:2] == ['c70', 'c3']
  assert len(names) == 30
  assert names[-1] == '71 other classes'
  shown = np.array(axes.images[0].get_array())
  assert shown[0, 1] == pytest.approx(50 / (50 + count_VV[70, 70]))
  assert shown[-1, -1] == 1
  assert f'Images: {count_VV.sum():,}' in seen.words(figure)

"""Mean average precision against pycocotools."""

import pathlib

import numpy as np
import pytest

from mod_jax.losses import mean_precision
from mod_jax.losses.mean_precision import Boxes

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'map_expected.npz'


def boxes(rows, picture):
  rows = rows[rows[:, 0] == picture]
  centres = np.column_stack([rows[:, 2:4] + rows[:, 4:6] / 2, rows[:, 4:6]])
  score = rows[:, 6] if rows.shape[1] > 6 else None
  return Boxes(rows[:, 1].astype(int), centres, score)


NOTHING = Boxes(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0))


@pytest.mark.parametrize('crowds', [False, True])
def test_precisions_are_those_of_pycocotools(crowds):
  with np.load(GOLDEN) as archive:
    rows = [archive[k] for k in ('found', 'there', 'crowds')]
    wanted = archive['ap_with_crowds' if crowds else 'ap']
  if not crowds:
    rows[2] = rows[2][:0]
  by_picture = [[boxes(x, i) for i in range(12)] for x in rows]
  ap_VJ = mean_precision.average_precisions(*by_picture, 4)
  np.testing.assert_allclose(ap_VJ, wanted, atol=1e-9)
  assert np.isnan(wanted).any(axis=1).tolist() == [False] * 3 + [True]
  assert len(set(np.round(wanted[:3].ravel(), 6))) > 15


def test_units_of_an_axis_do_not_matter():
  with np.load(GOLDEN) as archive:
    found, there = (boxes(archive[k], 5) for k in ('found', 'there'))
  scale = np.array([0.01, 3, 0.01, 3])
  scaled = [x._replace(box_N4=x.box_N4 * scale) for x in (found, there)]
  np.testing.assert_allclose(
    *(
      mean_precision.average_precisions([a], [b], [NOTHING], 4)
      for a, b in ((found, there), scaled)
    )
  )


def test_nothing_found():
  there = Boxes(np.array([1]), np.ones((1, 4)))
  ap_VJ = mean_precision.average_precisions([NOTHING], [there], [NOTHING], 2)
  assert np.isnan(ap_VJ[0]).all()
  assert (ap_VJ[1] == 0).all()

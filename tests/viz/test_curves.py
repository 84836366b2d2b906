"""Curves hold the records of a run, whatever these are."""

import numpy as np
import pytest

from mod_jax import viz

pytestmark = pytest.mark.filterwarnings('error')


def run_records(steps=1000, every=5):
  records = []
  for i in range(0, steps + 1, every):
    loss = 1.5 + 4 * np.exp(-i / 30) + 0.02 * (-1) ** i
    records.append({'step': i, 'kind': 'train', 'loss': loss, 'rate': 3.0})
    if i and i % 200 == 0:
      record = {'step': i, 'kind': 'eval', 'top_k/loss': 1.6}
      for j, rule in enumerate(('router', 'predictor')):
        record |= {
          f'{rule}/loss': 1.61 + j / 100,
          f'{rule}/accuracy': 0.97 - j / 100 + i / 1e5,
          f'{rule}/never_route': 0.875,
        }
      records.append(record)
  return records


class TestLossCurves:
  def test_lines_hold_the_records(self, seen):
    records = run_records()
    figure = viz.loss_curves(records, unit='token')
    figure.canvas.draw()
    losses, accuracy = figure.axes
    train = [(r['step'], r['loss']) for r in records if r['kind'] == 'train']
    np.testing.assert_allclose(seen.mark(losses, 'train').get_xydata(), train)
    for gid in (
      *('top_k/loss', 'router/loss', 'predictor/loss'),
      *('router/accuracy', 'predictor/accuracy', 'router/never_route'),
    ):
      expected = [(r['step'], r[gid]) for r in records if gid in r]
      assert len(expected) == 5
      line = seen.mark(losses if 'loss' in gid else accuracy, gid)
      np.testing.assert_allclose(line.get_xydata(), expected)
      if 'never' not in gid:
        assert line.get_color() == viz.RULES[gid.split('/')[0]].color
    # The same for both rules: one line says it.
    assert not seen.marks(accuracy, 'predictor/never_route')
    assert 'nats per token' in losses.get_ylabel()

  @pytest.mark.parametrize(('spike', 'note'), [(None, '5.52'), (30.0, '30.00')])
  def test_neither_first_steps_nor_a_spike_flatten_the_rest(
    self, seen, spike, note
  ):
    records = run_records()
    if spike:
      records[-40]['loss'] = spike
    axes = viz.loss_curves(records).axes[0]
    low, high = axes.get_ylim()
    assert low < 1.5 < 1.7 < high < 2.5
    assert seen.texts(axes, 'beyond') == [f'↑ up to {note}']

  def test_skips_what_is_no_number_and_steps_done_again(self, seen):
    losses = (2.0, 9.0, float('nan'), float('inf'), None, 'NaN')
    records = [
      {'step': i, 'kind': 'train', 'loss': loss}
      for i, loss in enumerate(losses, 1)
    ]
    records += [
      {'step': 5, 'kind': 'train'},
      {'step': 2, 'kind': 'train', 'loss': 4.5},
      {'kind': 'train', 'loss': 9.0},
      {'step': 7, 'kind': 'train', 'loss': np.float32(1.0)},
      {'step': 7, 'kind': 'sample', 'loss': 9.0},
      {'step': 7, 'kind': 'eval', 'loss': 1.5, 'x/loss': float('nan')},
      {'step': 7, 'kind': 'eval', 'accuracy': 0.5, 'never_route': 0.5},
    ]
    figure = viz.loss_curves(records)
    figure.canvas.draw()
    (axes,) = figure.axes
    points = seen.mark(axes, 'train').get_xydata()
    np.testing.assert_array_equal(points, [(1, 2.0), (2, 4.5), (7, 1.0)])
    np.testing.assert_array_equal(
      seen.mark(axes, '/loss').get_xydata(), [(7, 1.5)]
    )
    assert not seen.marks(axes, 'x/loss')


def test_curves_of_experts_leave_out_what_is_always_0(seen):
  train = {'kind': 'train', 'experts/null': 0.25, 'experts/dropped': 0.0}
  records = [{'step': s, 'experts/busiest': 3 - s, **train} for s in (0, 1)]
  held_out = {'top_k/experts/busiest': 1.5, 'never/experts/busiest': 9.0}
  records.append({'step': 1, 'kind': 'eval', **held_out})
  figure = viz.expert_curves(records, null_target=0.5)
  busiest, null = figure.axes
  points = seen.mark(busiest, 'train').get_xydata()
  assert points.tolist() == [[0, 3], [1, 2]]
  points = seen.mark(busiest, 'top_k/busiest').get_xydata()
  assert points.tolist() == [[1, 1.5]]
  assert not seen.marks(busiest, 'never/busiest')
  for axes, reference in ((busiest, 1.0), (null, 0.5)):
    assert set(seen.mark(axes, 'reference').get_ydata()) == {reference}
  assert '0 throughout: dropped.' in seen.words(figure)


def test_every_number_of_corruptions_is_drawn(seen):
  curve = {'adaptive': [0.9, 0.2], 'dense': [0.95, 0.3], 'load': [0.4, 0.5]}
  other = curve | {'dense': [0.9, 0.7]}
  figure = viz.corruption_curves({'noise': curve, 'blur': other}, budget=0.4)
  for gid in ('adaptive', 'dense', 'load'):
    drawn = [line.get_xydata().T.tolist() for line in seen.marks(figure, gid)]
    assert drawn == [[[0, 1], curve[gid]], [[0, 1], other[gid]]]
  assert set(seen.marks(figure, 'budget')[0].get_ydata()) == {0.4}
  titles = [axes.get_title(loc='left') for axes in figure.axes]
  assert titles == ['noise', 'blur', '', '']

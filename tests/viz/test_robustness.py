"""Curves over severities: what is drawn, and what is refused."""

from mod_jax import viz

FOUND = {
  'adaptive': [0.9, 0.7, 0.2],
  'dense': [0.95, 0.6, 0.3],
  'load': [0.4, 0.45, 0.5],
}


def lines(figure, gid):
  return [
    line for axes in figure.axes for line in axes.lines if line.get_gid() == gid
  ]


def test_every_number_is_drawn():
  other = FOUND | {'dense': [0.9, 0.8, 0.7]}
  figure = viz.corruption_curves({'noise': FOUND, 'blur': other}, budget=0.4)
  figure.canvas.draw()
  for gid in ('adaptive', 'dense', 'load'):
    drawn = [list(line.get_ydata()) for line in lines(figure, gid)]
    assert drawn == [FOUND[gid], other[gid]]
    assert list(lines(figure, gid)[0].get_xdata()) == [0, 1, 2]
  assert {line.get_ydata()[0] for line in lines(figure, 'budget')} == {0.4}
  titles = [a.get_title(loc='left') for a in figure.axes]
  assert titles == ['noise', 'blur', '', '']

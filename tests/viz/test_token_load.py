"""The picture of compute over a text: the right shares over the right words."""

import numpy as np

from mod_jax import viz


def test_shares_stand_over_their_tokens(tmp_path):
  share_RL = np.linspace(0, 1, 120).reshape(2, 60)
  pieces = [f'$w{i}$' if i % 3 else '\n' for i in range(60)]
  figure = viz.token_load(
    share_RL, pieces, layers=[1, 4], unit='share of all', title='A title'
  )
  panels = [a for a in figure.axes if a.get_ylabel() == 'block']
  assert len(panels) == 2
  # Read back from the picture: the last block on top, each token once.
  drawn = np.concatenate(
    [p.images[0].get_array()[::-1] for p in panels], axis=1
  )
  np.testing.assert_array_equal(drawn, share_RL)
  labels = [t.get_text() for p in panels for t in p.get_xticklabels()]
  assert labels[:3] == ['⏎', '$w1$', '$w2$']
  assert len(labels) == 60
  assert [t.get_text() for t in panels[0].get_yticklabels()] == ['1', '4']
  assert {p.images[0].get_clim() for p in panels} == {(0, 1)}
  viz.save(figure, tmp_path / 'load.png')
  # Everything lies within the figure.
  width, height = figure.canvas.get_width_height()
  for panel in panels:
    box = panel.get_tightbbox()
    assert 0 <= box.x0 <= box.x1 <= width
    assert 0 <= box.y0 <= box.y1 <= height

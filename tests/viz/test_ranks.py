"""Bars of ranks stand where their numbers are."""

from matplotlib import colors

from mod_jax import viz
from mod_jax.viz import style


def test_bars_and_what_is_suggested():
  shares = [1.0, 0.25, 0.5, 0.75]
  figure = viz.attention_ranks(shares, routed=[1, 3], suggested=[1, 2])
  (axes,) = figure.axes
  bars = [bar for bar in axes.patches if bar.get_gid() == 'share']
  assert [bar.get_height() for bar in bars] == shares
  assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == [0, 1, 2, 3]
  filled = [colors.to_hex(bar.get_facecolor()).upper() for bar in bars]
  assert filled == [style.FAINT, style.CHOSEN] * 2
  (line,) = (x for x in axes.lines if x.get_gid() == 'suggested')
  assert list(zip(*line.get_data(), strict=True)) == [(1, 0.25), (2, 0.5)]

"""What a number came to in several runs of each of several kinds."""

from collections.abc import Mapping
from collections.abc import Sequence
import statistics

from matplotlib.figure import Figure

from mod_jax.viz import style


def seed_dots(
  groups: Mapping[str, Mapping[str, Sequence[float]]],
  *,
  xlabel: str,
  title: str = '',
) -> Figure:
  """Draws a panel per group, a row per kind of run and a dot per run.

  A bar marks the mean of a row. Panels have axes of their own, since numbers of
  different groups need not be comparable.

  Args:
    groups: by the group's name and the kind's, the numbers of its runs; rows
      stand in the order given. Kinds without runs are left out.
    xlabel: what the numbers are, with their unit.
    title: says what is seen.
  """
  groups = {
    group: {name: values for name, values in rows.items() if len(values)}
    for group, rows in groups.items()
  }
  groups = {group: rows for group, rows in groups.items() if rows}
  heights = [0.24 * len(rows) + 0.55 for rows in groups.values()] or [1.0]
  figure, body = style.new_figure(7.5, sum(heights) + 0.5, title)
  panels = body.subplots(len(heights), squeeze=False, height_ratios=heights)
  panels = panels[:, 0]
  if not groups:
    style.say(panels[0], 'No run is finished yet')
  for axes, (group, rows) in zip(panels, groups.items(), strict=False):
    style.clean(axes)
    style.heading(axes, group)
    for i, values in enumerate(rows.values()):
      dots = {'marker': 'o', 'ms': 5, 'alpha': 0.75, 'color': style.CHOSEN}
      axes.plot(values, [i] * len(values), ls='', gid='run', **dots)
      bar = {'marker': '|', 'ms': 13, 'mew': 2, 'color': style.INK}
      axes.plot(statistics.mean(values), i, ls='', gid='mean', **bar)
    axes.set_yticks(range(len(rows)), map(style.shortened, rows))
    axes.tick_params(axis='y', length=0, labelcolor=style.INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # The first on top.
    axes.grid(axis='y', color=style.DENSE)
    axes.set_axisbelow(True)
  if groups:
    # At the right, where a long one has room to its left.
    panels[-1].set_xlabel(style.shortened(xlabel, 60), loc='right')
  return figure

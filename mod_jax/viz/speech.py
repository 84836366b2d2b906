"""Pictures of compute over speech."""

from collections.abc import Sequence

from matplotlib.figure import Figure
import numpy as np

from mod_jax.viz import glyphs, style

_LETTER = 0.075  # Width of a letter in inches.


def load_over_time(
  recordings: Sequence[
    tuple[np.ndarray, np.ndarray, str, Sequence[tuple[str, int]]]
  ],
  *,
  rate: int,
  unit: str,
  title: str,
) -> Figure:
  """Draws the load of each frame above the spectrogram of each recording.

  A recording has samples [T], `rate` per second; the load of its frames [L], in
  `unit`; the text to write above the load; and the recognised letters, each
  with the index of its frame, to write below the spectrogram.
  """
  # Imported only here, since SciPy takes long to import.
  from scipy import signal

  longest = max(len(samples_T) for samples_T, *_ in recordings) / rate
  width = float(np.clip(2.5 * longest, 7, 12))
  body = style.new_figure(
    *(width, 2.6 * len(recordings), title),
    f'Above each spectrogram the {unit}, below it what is heard.',
  )
  axes = body.subplots(
    2 * len(recordings),
    1,
    squeeze=False,
    height_ratios=(1, 1.6) * len(recordings),
  )[:, 0]
  top = max(float(np.max(load_L)) for _, load_L, *_ in recordings) or 1.0
  for i, (samples_T, load_L, text, heard) in enumerate(recordings):
    above, below = axes[2 * i], axes[2 * i + 1]
    seconds = len(samples_T) / rate
    edges = np.linspace(0, seconds, len(load_L) + 1)
    above.stairs(load_L, edges, fill=True, color=style.SERIES_COLORS[0])
    above.set(xlim=(0, seconds), ylim=(0, 1.05 * top), xticklabels=[])
    above.set_title(glyphs.plain(text), loc='left', size=9)
    window = min(len(samples_T), max(16, rate // 50))
    _, _, power_FT = signal.spectrogram(
      samples_T, rate, nperseg=window, noverlap=window // 2
    )
    below.imshow(
      np.log10(power_FT + 1e-9),
      origin='lower',
      aspect='auto',
      cmap='Greys',
      extent=(0, seconds, 0, rate / 2000),
    )
    below.set(xlabel='seconds', ylabel='kHz')
    # Draw letters as minor ticks, for which the layout leaves room.
    least = _LETTER * seconds / (width - 0.8)
    below.xaxis.remove_overlapping_locs = False
    letters = [glyphs.display_piece(letter) for letter, _ in heard]
    places = [edges[frame : frame + 2].mean() for _, frame in heard]
    places = _apart(places, [least * len(letter) for letter in letters])
    below.set_xticks(places, letters, minor=True, va='baseline')
    glyphs.write_pieces(below.get_xticklabels(minor=True))
    look = {'length': 0, 'pad': 11, 'labelcolor': style.CHOSEN}
    below.tick_params(axis='x', which='minor', **look)
    below.tick_params(axis='x', which='major', pad=17, direction='in')
  return body.get_figure(root=True)


def _apart(places: Sequence[float], widths: Sequence[float]) -> list[float]:
  """Returns the middles of texts, moved right as far as texts would overlap."""
  moved, end = [], -np.inf
  for place, width in zip(places, widths, strict=True):
    moved.append(max(place, end + width / 2))
    end = moved[-1] + width / 2
  return moved

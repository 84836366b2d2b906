"""Pictures of compute over speech."""

from collections.abc import Sequence

from matplotlib.figure import Figure
import numpy as np

from mod_jax.viz import glyphs, style


def load_over_time(
  recordings: Sequence[tuple[np.ndarray, np.ndarray, str]],
  *,
  rate: int,
  unit: str,
  title: str,
) -> Figure:
  """Draws the load of each frame above the spectrogram of each recording.

  `recordings` are samples [T], `rate` a second, the load of the frames [L] in
  `unit`, and the transcript.
  """
  # Imported here, since it is heavy.
  from scipy import signal

  body = style.new_figure(
    7, 2.4 * len(recordings), title, f'Above each spectrogram the {unit}.'
  )
  axes = body.subplots(
    2 * len(recordings),
    1,
    squeeze=False,
    height_ratios=(1, 1.6) * len(recordings),
  )[:, 0]
  top = max(float(np.max(load_L)) for _, load_L, _ in recordings) or 1.0
  for i, (samples_T, load_L, text) in enumerate(recordings):
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
  return body.get_figure(root=True)

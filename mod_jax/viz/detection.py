"""Pictures with the boxes that a detector found, and the tokens it routed."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
import numpy as np

from mod_jax.viz import glyphs, images, style

Found = Sequence[tuple[str, float, tuple[float, float, float, float]]]


def boxes(
  images_BHWC,
  found: Sequence[Found],
  processed: Mapping[str, np.ndarray],
  *,
  grid: tuple[int, int],
  title: str = 'What is found, and which tokens are processed',
) -> Figure:
  """Draws a row per picture: its boxes, then the tokens of each routed layer.

  `found` has for each picture its boxes, (class name, score, (left, top, right,
  bottom) in pixels). `processed` has by the name of a routed layer the mask
  [B, L] of the tokens that the layer processed.
  """
  images_BHWC = np.asarray(images_BHWC)
  body, axes_B, _ = images.image_grid(
    [
      [
        [(image, {})],
        *([(images.veiled(image, x[i], grid), {})] for x in processed.values()),
      ]
      for i, image in enumerate(images_BHWC)
    ],
    grid,
    title=title,
    subtitle='Boxes with class and score; grey: the layer skips the token.',
    above=[['found', *processed]],
    below=[
      [
        _listed(of_picture),
        *(f'{int(x[i].sum())} of {x[i].size}' for x in processed.values()),
      ]
      for i, of_picture in enumerate(found)
    ],
    aspect=images.patch_aspect(images_BHWC[0], grid),
  )
  pixels = np.array(images_BHWC.shape[1:3])
  down, across = np.array(grid) / pixels  # Tokens per pixel.
  for axes, of_picture in zip(axes_B, found, strict=True):
    for name, score, (left, top, right, bottom) in of_picture:
      axes.add_patch(
        Rectangle(
          (left * across, top * down),
          *((right - left) * across, (bottom - top) * down),
          **{'fill': False, 'ec': style.CHOSEN, 'lw': 1.2, 'zorder': 3},
        )
      )
      axes.text(
        *(left * across, top * down, f'{glyphs.plain(name)} {score:.2f}'),
        **{'fontsize': 6, 'color': 'white', 'va': 'bottom', 'zorder': 4},
        bbox={'fc': style.CHOSEN, 'ec': 'none', 'pad': 0.6},
      )
  return body.get_figure(root=True)


def _listed(of_picture: Found) -> str:
  count = len(of_picture)
  return f'{count} box{"es" * (count != 1)}'

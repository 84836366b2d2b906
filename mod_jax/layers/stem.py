"""LV-ViT's convolutional stem, before the patches are cut."""

import dataclasses

from flax import linen as nn
import jax

from mod_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvStemConfig:
  """Convolutions 7×7 with stride 2 and 3×3, each with BatchNorm and ReLU."""

  width: config_lib.Width = 64  # Channels.
  depth: config_lib.Unrolled = 3  # Convolutions.

  def __post_init__(self):
    config_lib.validate(self)

  def flops(self, image_size: int, features: int) -> dict[str, int]:
    """Returns FLOPs of stem and patch embedding; BatchNorm is folded in."""
    side = image_size // 2
    first = 2 * side**2 * 7**2 * 3 * self.width
    others = 2 * side**2 * 3**2 * self.width**2 * (self.depth - 1)
    # Patches tile the image, so their size does not matter.
    embed = 2 * side**2 * self.width * features
    return {'stem': first + others, 'embed': embed}


class ConvStem(nn.Module):
  """image_BHWC -> x_BHWC at half the resolution."""

  config: ConvStemConfig
  train: bool = False  # Whether BatchNorm uses and tracks batch statistics.
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    for i in range(self.config.depth):
      size, stride = (7, 2) if i == 0 else (3, 1)
      x_BHWC = nn.Conv(
        self.config.width,
        (size, size),
        strides=stride,
        # Explicit: 'SAME' would pad a strided convolution unevenly.
        padding=size // 2,
        use_bias=False,
        dtype=self.dtype,
        name=f'conv_{i}',
      )(x_BHWC)
      x_BHWC = nn.BatchNorm(
        use_running_average=not self.train,
        momentum=0.9,
        epsilon=1e-5,
        dtype=self.dtype,
        name=f'norm_{i}',
      )(x_BHWC)
      x_BHWC = nn.relu(x_BHWC)
    return x_BHWC

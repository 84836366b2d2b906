"""LV-ViT's convolutional stem, before the patches are cut."""

import dataclasses

from flax import linen as nn
import jax

from mod_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvStemConfig:
  """A 7×7 convolution, then 3×3 ones, each with BatchNorm and ReLU."""

  width: config_lib.Width = 64  # Channels of each convolution.
  depth: config_lib.Unrolled = 3  # Number of convolutions.
  # How many of the first convolutions halve the resolution; 1 in LV-ViT.
  halvings: config_lib.Size = 1

  def __post_init__(self):
    check = config_lib.validate(self)
    check(self.halvings <= self.depth, 'at most depth', *('halvings', 'depth'))

  @property
  def stride(self) -> int:
    """Pixels between neighbouring features."""
    return 2**self.halvings

  @property
  def channels(self) -> int:
    """Channels of the features."""
    return self.width

  def flops(self, height: int, width: int) -> int:
    """Returns the convolutions' FLOPs for a picture of this size in pixels."""
    total, inputs = 0, 3
    for i in range(self.depth):
      if i < self.halvings:
        height, width = (height + 1) // 2, (width + 1) // 2
      side = 3 if i else 7
      total += 2 * height * width * side**2 * inputs * self.width
      inputs = self.width
    return total


class ConvStem(nn.Module):
  """Maps image_BHWC to x_BHWC at 1/`config.stride` of the resolution."""

  config: ConvStemConfig
  train: bool = False  # Whether BatchNorm uses and tracks batch statistics.
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    for i in range(self.config.depth):
      size = 3 if i else 7
      stride = 2 if i < self.config.halvings else 1
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

"""What the timings of vision models share: sizes, and timm's model beside."""

from collections.abc import Callable, Mapping

from absl import flags
import child
import machine

from mod_jax import timing
from mod_jax.models import vit

_BACKBONE = flags.DEFINE_enum(
  'backbone', 'deit_small', list(vit.BACKBONES), 'Which sizes.'
)
_IMAGE = flags.DEFINE_integer('image_size', 224, 'Pixels a side.')
DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.'
)
_LAYERS = flags.DEFINE_integer('layers', None, "Not the backbone's blocks.")
_TORCH = flags.DEFINE_string(
  'torch', None, 'A Python with torch and timm; None goes without.'
)


def model(**fields) -> vit.ViTConfig:
  """Returns the backbone with other fields."""
  fields |= {'image_size': _IMAGE.value, 'dtype': DTYPE.value}
  if _LAYERS.value is not None:
    fields['num_layers'] = _LAYERS.value
  return vit.BACKBONES[_BACKBONE.value](**fields)


def interleaved(
  makers: Mapping[str, Callable], kind: str, batch: int, rounds: int
) -> tuple[dict[str, Callable], dict[str, list[float]], dict]:
  """Builds steps and times them in turn, with timm's if there is a `--torch`.

  Args:
    makers: return the steps, by name; `dense` among them.
    kind: timm's step, of `torch_steps.py`.
    batch: its number of images.
    rounds: timed turns of each.

  Returns:
    The steps; their seconds, as `timing.interleaved`; and the entry `torch` of
    results, if that was timed.
  """
  steps = machine.built(makers)
  settings = {'rounds': rounds, 'warmup': 2, 'queued': timing.queue_length()}
  if not _TORCH.value:
    return steps, timing.interleaved(steps, **settings), {}
  dense = model()
  sizes = (dense.image_size, dense.width, dense.num_layers, dense.num_heads)
  with child.torch_steps(_TORCH.value, kind, batch, *sizes) as (torch, about):
    seconds = timing.interleaved(steps | {'torch': torch}, **settings)
  ratio = timing.ratio_spread(seconds, 'dense', 'torch')[0]
  return steps, seconds, {'torch': {'about': about, 'dense_over_torch': ratio}}

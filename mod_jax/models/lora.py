"""Merges low-rank adapters into the maps that they adapt."""

import re
from typing import Any

from flax import linen as nn
import numpy as np

from mod_jax import trees
from mod_jax.layers.lora import PARAMETERS

_DOWN = '_lora/down/kernel'


def merge(config, params) -> tuple[Any, Any]:
  """Returns config and parameters with each adapter's update in its kernel.

  The model computes the same function, up to rounding. Parameters without an
  adapter are not changed; adapted kernels become float32 arrays on the host.

  Args:
    config: config of a model with adapters; the new one has `lora=None`.
    params: nested dictionary of the model's parameters.
  """
  scale = config.lora.alpha / config.lora.rank
  flat = trees.flatten(nn.unbox(params))
  merged = {k: x for k, x in flat.items() if not re.fullmatch(PARAMETERS, k)}
  for name in flat:
    if not name.endswith(_DOWN):
      continue
    adapted = name.removesuffix(_DOWN)
    kernel = f'{adapted}/kernel'
    if kernel not in merged:  # Learners have one array for all their kernels.
      kernel = adapted
    down, up, weight = (
      np.asarray(x, np.float32)
      for x in (flat[name], flat[f'{adapted}_lora/up/kernel'], merged[kernel])
    )
    # Leading axes of `down`: groups, if the layers of the model or of a part
    # such as `language` are scanned; then experts or learners, if any.
    scanned = 'layers' in name.split('/')
    stacked = bool(re.search('_(experts|acm)/', name))
    stacks = down.shape[: scanned + stacked]
    rank = config.lora.rank
    update = down.reshape(*stacks, -1, rank) @ up.reshape(*stacks, rank, -1)
    merged[kernel] = weight + scale * update.reshape(weight.shape)
  return config.with_parts(lora=None), trees.unflatten(merged)


def adapters(params) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the adapters' parameters, by name."""
  return {
    name: tuple(array.shape)
    for name, array in trees.flatten(params).items()
    if re.fullmatch(PARAMETERS, name)
  }

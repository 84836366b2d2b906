"""Merges low-rank adapters into the maps that they adapt."""

import re
from typing import Any

from flax import linen as nn
import numpy as np

from mod_jax import trees
from mod_jax.layers.lora import PARAMETERS

_DOWN = '_lora/down/kernel'


def merge(config, params) -> tuple[Any, Any]:
  """Returns the model in which each kernel has its adapter's update added.

  It computes the same function, up to rounding. Parameters without an adapter
  stay as they are; the others become float32 arrays on the host.

  Args:
    config: of a model with adapters; the result's has `lora=None`.
    params: nested dictionary of its parameters.
  """
  scale = config.lora.alpha / config.lora.rank
  flat = trees.flatten(nn.unbox(params))
  merged = {k: x for k, x in flat.items() if not re.fullmatch(PARAMETERS, k)}
  for name in flat:
    if not name.endswith(_DOWN):
      continue
    adapted = name.removesuffix(_DOWN)
    kernel = f'{adapted}/kernel'
    if kernel not in merged:  # That of all learners, in no module of its own.
      kernel = adapted
    down, up, weight = (
      np.asarray(x, np.float32)
      for x in (flat[name], flat[f'{adapted}_lora/up/kernel'], merged[kernel])
    )
    # Axes of scanned groups, and of experts or learners.
    stacks = down.shape[: _is_scanned(name) + _is_stacked(name)]
    rank = config.lora.rank
    update = down.reshape(*stacks, -1, rank) @ up.reshape(*stacks, rank, -1)
    merged[kernel] = weight + scale * update.reshape(weight.shape)
  return config.with_parts(lora=None), trees.unflatten(merged)


def _is_scanned(name: str) -> bool:
  return 'layers' in name.split('/')  # Perhaps those of a part of the model.


def _is_stacked(name: str) -> bool:
  return bool(re.search('_(experts|acm)/', name))


def adapters(params) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the adapters' parameters, by name."""
  return {
    name: tuple(array.shape)
    for name, array in trees.flatten(params).items()
    if re.fullmatch(PARAMETERS, name)
  }

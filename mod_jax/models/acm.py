"""Conversion of dense transformers to adaptive ones, module by module.

The patterns of `adaptive` in a model's config select the FFNs and projections
that are split into learners (Wójcik et al. 2023, section 3.3).
"""

import dataclasses
import re
from typing import Any

from flax import linen as nn
import flax.struct
import jax

from mod_jax import config as config_lib
from mod_jax import tables, trees
from mod_jax.errors import require
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.acm import ACMConfig, AdaptiveConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.models.detr import DETRConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config

# Patterns of the parameters that only adaptive models have, and of the gates'
# parameters among them.
PARAMETERS = r'.*_acm/.*'
GATES = r'.*_acm/gate/.*'


def slots(config) -> dict[str, Slot]:
  """Returns all module slots (`layers/slots.py`) by name: `block_0/mlp` etc."""
  return {
    f'block_{i}/{name}': slot
    for i, layer in enumerate(config.stack.layers)
    for name, slot in layer.block.slots.items()
  }


def modules(config) -> dict[str, ACMConfig]:
  """Returns the configs of a model's adaptive modules, by slot name."""
  return {
    name: slot
    for name, slot in slots(config).items()
    if isinstance(slot, ACMConfig)
  }


def subtree(params, name: str):
  """Returns the parameters of the adaptive module in the named slot."""
  for part in f'{name}_acm'.split('/'):
    params = params[part]
  return params


def replaced(config) -> tuple[str, ...]:
  """Returns patterns of the dense parameters that adaptive modules replace."""
  return tuple(f'(layers/)?{re.escape(name)}/.*' for name in modules(config))


@flax.struct.dataclass
class Captured:
  """Input and output of a dense module that an ACM will replace.

  Attributes:
    z_BLD: input; the axes of heads and of channels are flattened to one axis.
    y_BLD: output; its axes are flattened in the same way.
    valid_BL: False for padding and for a routed block's empty token slots; None
      if all tokens are valid.
  """

  z_BLD: jax.Array
  y_BLD: jax.Array
  valid_BL: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched(Slot):
  """Runs a module slot, and adds its `Captured` to the aux."""

  slot: Slot

  def run(self, x, info, **kwargs):
    y, aux = self.slot.run(x, info, **kwargs)
    z_BLD, y_BLD = (a.reshape(*a.shape[:2], -1) for a in (x, y))
    return y, aux | {'captured': Captured(z_BLD, y_BLD, info.valid_BL)}

  def flops(self, tokens):
    return self.slot.flops(tokens)

  @property
  def num_params(self):
    return self.slot.num_params


class _Watching(AdaptiveConfig):
  """Wraps the modules to replace by `_Watched` slots, and replaces none."""

  def _module(self, name, slot, width):
    del width
    return _Watched(slot=slot)


def without(config):
  """Returns the config without adaptive modules or adapters: the teacher's."""
  return config.with_parts(adaptive=None, lora=None)


def capture(
  config, variables, *inputs, mode: Mode | None = None, rngs=None, **kwargs
) -> dict[str, Captured]:
  """Returns inputs and outputs of the dense modules to replace, by slot name.

  Of a routed or pruned model, only the tokens that a module would process are
  captured. `config` is the adaptive model's config; `variables` are those of
  the model without adaptive modules. `inputs` and `kwargs` are passed to the
  model, which runs in `mode`; None means as in inference.
  """
  mode = Mode() if mode is None else mode
  watching = _Watching(**vars(config.adaptive))
  module = config.with_parts(adaptive=watching, lora=None).build(**vars(mode))
  output = module.apply(variables, *inputs, **kwargs, rngs=rngs)
  return stack_lib.collect(output.aux, 'captured')


def acmize(
  config, params, *, key: jax.Array | None = None, **options
) -> tuple[Any, Any, str]:
  """Replaces modules of a model by freshly initialised adaptive ones.

  Args:
    config: config of the model; it may be routed or pruned.
    params: parameters of the model.
    key: random key to initialise the new modules; None means
      `jax.random.key(0)`.
    **options: fields of `AdaptiveConfig`.

  Returns:
    Config and parameters of the adaptive model, and the text of `report`.

  Raises:
    UserError: the model cannot be adaptive, or an option does not fit it.
  """
  require(
    not isinstance(config, DETRConfig | VLMConfig),
    'no detector, which has no adaptive modules; and of a model that reads'
    " pictures its language model: config.language, params['language']",
    model=type(config).__name__,
  )
  adaptive = config_lib.replace(AdaptiveConfig(), options)
  model = config.with_parts(adaptive=adaptive)
  params = nn.unbox(params)
  key = jax.random.key(0) if key is None else key
  fresh = nn.unbox(jax.jit(model.build().init)(key, model.example()))
  merged = trees.merge(
    fresh['params'],
    params,
    new=(PARAMETERS,),
    dropped=replaced(model),
    describe='the model',
  )
  return model, merged, report(model)


def report(config, *length: int) -> str:
  """Returns a table of the replaced modules, with parameters and FLOPs.

  `length` is a sequence's number of tokens, for language models, or a
  recording's number of frames; 1 by default. Models of images take none.
  """
  original = without(config)
  dense = slots(original)
  if isinstance(config, LMConfig | Wav2Vec2Config) and not length:
    length = (1,)
  groups = {}
  for name, module in modules(config).items():
    label = re.sub(r'\d+', '*', name, count=1)
    groups.setdefault((label, dense[name], module), []).append(name)
  rows = [
    [
      *('module', 'of', 'dense', 'learners', 'choices', 'parameters'),
      'MFLOPs a token',
    ]
  ]
  for (label, before, after), names in groups.items():
    hidden = getattr(before, 'hidden', after.outputs)
    cost_before, cost = (sum(x.flops(1).values()) for x in (before, after))
    rows.append(
      [
        label,
        str(len(names)),
        f'{after.inputs}->{hidden}',
        f'{after.num_learners} x {after.inputs}->{after.hidden}',
        f'{after.min_learners}..{after.num_learners}',
        f'{before.num_params:,} -> {after.num_params:,}',
        f'{cost_before / 1e6:.3f} -> {cost / 1e6:.3f}',
      ]
    )

  def total(table):
    return sum(
      count
      for _, parts in table
      for part, count in parts.items()
      if part != 'norm'
    )

  total_before = total(original.flops_table(*length))
  after = total(config.flops_table(*length))
  title = 'dense' if original == config.dense_twin() else 'before'
  gate = sum(parts.get('gate', 0) for _, parts in config.flops_table(*length))
  return '\n'.join(
    [
      *tables.aligned(rows),
      f'FLOPs, forward: {title} {total_before:.4e}; with all learners'
      f' {after:.4e} ({after / total_before:.4f} of it), of which gates'
      f' {gate / total_before:.4f}.',
    ]
  )

"""Dense transformers turned into adaptive ones, module by module.

Any of our transformers will do: `adaptive` of its config says by rules which
FFNs and projections are split into learners (Wójcik et al. 2023, section 3.3).
"""

import dataclasses
import re
from typing import Any

from flax import linen as nn
import jax

from mod_jax import trees
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.acm import ACMConfig
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.slots import Slot
from mod_jax.models.lm import LMConfig

# Names of what only an adaptive model has: its learners, and its gates.
PARAMETERS = r'.*_acm/.*'
GATES = r'.*_acm/gate/.*'


def slots(config) -> dict[str, Slot]:
  """Returns all slots of a model, by name: `block_0/mlp` and so on."""
  return {
    f'block_{i}/{name}': slot
    for i, layer in enumerate(config.stack.layers)
    for name, slot in layer.block.slots.items()
  }


def modules(config) -> dict[str, ACMConfig]:
  """Returns a model's adaptive modules, by the name of the slot of each."""
  return {
    name: slot
    for name, slot in slots(config).items()
    if isinstance(slot, ACMConfig)
  }


def subtree(params, name: str):
  """Returns the parameters of an adaptive module."""
  for part in f'{name}_acm'.split('/'):
    params = params[part]
  return params


def replaced(config) -> tuple[str, ...]:
  """Returns rules for the dense parameters that an adaptive model lacks."""
  return tuple(f'(layers/)?{re.escape(name)}/.*' for name in modules(config))


def capture(
  config, variables, *inputs, **kwargs
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Runs the dense twin; returns input and output of what would be replaced.

  `config` is that of the adaptive model, `variables` are those of its dense
  twin, which is called with the rest.

  Returns:
    By slot: z_BLD and y_BLD, heads flattened.
  """
  twin = config.dense_twin()
  # Arrays that are noted within a scan, or within what is computed again for
  # the backward pass, could not leave it.
  plain = {'remat': 'none'}
  if isinstance(twin, LMConfig):
    plain['scan_layers'] = False
  variables = {
    name: stack_lib.unrolled(twin.stack, collection)
    for name, collection in variables.items()
  }
  names = modules(config)

  def run(module, *inputs, **kwargs):
    seen = {}

    def note(next_fun, args, kwargs, context):
      output = next_fun(*args, **kwargs)
      name = '/'.join(context.module.path)
      if context.method_name == '__call__' and name in names:
        seen[name] = tuple(
          x.reshape(*x.shape[:2], -1) for x in (args[0], output)
        )
      return output

    with nn.intercept_methods(note):
      module(*inputs, **kwargs)
    return seen

  return nn.apply(run, dataclasses.replace(twin, **plain).build())(
    variables, *inputs, **kwargs
  )


def acmize(
  config, params, *, key: jax.Array | None = None, **options
) -> tuple[Any, Any, str]:
  """Turns a dense model into one with adaptive modules, freshly initialised.

  Args:
    config: of the dense model.
    params: its parameters.
    key: for the new modules; None is `jax.random.key(0)`.
    **options: fields of `AdaptiveConfig`.

  Returns:
    Config and parameters of the adaptive model, and a report of what was
    replaced by what.

  Raises:
    UserError: parameters that do not fit the config, no module matched by a
      rule, or a number of learners that does not divide a module's units.
  """
  model = dataclasses.replace(config, adaptive=AdaptiveConfig(**options))
  params = nn.unbox(params)
  key = jax.random.key(0) if key is None else key
  fresh = nn.unbox(jax.jit(model.build().init)(key, model.example()))
  merged = trees.merge(
    fresh['params'],
    params,
    new=(PARAMETERS,),
    dropped=replaced(model),
    describe='the dense model',
  )
  return model, merged, report(model)


def report(config, *length: int) -> str:
  """Returns what is replaced by what, with parameters and FLOPs, for people.

  `length` are a sequence's tokens, for language models; one by default.
  """
  twin = config.dense_twin()
  dense = slots(twin)
  if isinstance(config, LMConfig) and not length:
    length = (1,)
  groups = {}
  for name, module in modules(config).items():
    label = re.sub(r'\d+', '*', name, count=1)
    groups.setdefault((label, dense[name], module), []).append(name)
  titles = ('module', 'of', 'dense', 'learners', 'choices')
  lines = [
    f'{titles[0]:<24}{titles[1]:>5}{titles[2]:>14}{titles[3]:>22}'
    f'{titles[4]:>9}{"parameters":>22}{"MFLOPs a token":>22}'
  ]
  for (label, before, after), names in groups.items():
    hidden = getattr(before, 'hidden', after.outputs)
    cost = sum(after.flops(1).values())
    cost_before = sum(before.flops(1).values())
    lines.append(
      f'{label:<24}{len(names):>5}{f"{after.inputs}->{hidden}":>14}'
      f'{f"{after.num_learners} x {after.inputs}->{after.hidden}":>22}'
      f'{f"{after.min_learners}..{after.num_learners}":>9}'
      f'{f"{before.num_params:,} -> {after.num_params:,}":>22}'
      f'{f"{cost_before / 1e6:.3f} -> {cost / 1e6:.3f}":>22}'
    )

  def total(table):
    return sum(
      count
      for _, parts in table
      for part, count in parts.items()
      if part != 'norm'
    )

  before = total(twin.flops_table(*length))
  after = total(config.flops_table(*length))
  gate = sum(parts.get('gate', 0) for _, parts in config.flops_table(*length))
  lines.append(
    f'FLOPs, forward: dense {before:.4e}; with all learners {after:.4e}'
    f' ({after / before:.4f} of it), of which gates {gate / before:.4f}.'
  )
  return '\n'.join(lines)

"""Weights to start from: those of another run, or of checkpoint files.

Only the directory of the other run is needed, neither its data nor its
tokenizer, and its model may differ from the one to be trained.
"""

from collections.abc import Sequence
import functools
import re
from typing import Any

from absl import logging
import jax
import numpy as np

from mod_jax import trees
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import vit as convert_vit
from mod_jax.data import fingerprint
from mod_jax.errors import UserError
from mod_jax.models import lm, lora, protocol
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.pretrained import source as source_lib
from mod_jax.runs import best
from mod_jax.runs import origin as origin_lib


def load_weights(
  init: str, model, params, model_state, *, whole: bool = False, **kwargs
) -> tuple[Any, Any]:
  """Returns variables of a model with values from what `init` names.

  Arguments and errors are those of `load_image_weights`; leaves that are
  replaced may be shapes.
  """
  if not isinstance(model, LMConfig):
    return load_image_weights(
      *(init, model, params, model_state), whole=whole, **kwargs
    )
  # A language model's head must be present in any case.
  source = source_lib.Source.of_init(init)
  if source.kind == 'language':
    weights = source.read(model)['params']
    kwargs['describe'] = f'init={init}'
    return trees.merge(params, weights, **kwargs), model_state
  return from_ours(params, model_state, init, model=model, **kwargs)


def _variables(source: 'source_lib.Source', params) -> dict[str, Any]:
  """Returns what a source holds, for a model with the parameters `params`.

  With what a run froze; adapters that the model does not have are merged.
  """
  variables = source.read()
  if source.kind == 'run' and source.experiment.train.frozen is not None:
    frozen = _frozen(source)
    variables['params'] = trees.join(variables['params'], frozen)
  found = lora.adapters(variables['params'])
  if found and found != lora.adapters(params):
    _, variables['params'] = lora.merge(source.config, variables['params'])
  return variables


def _frozen(source: 'source_lib.Source') -> dict[str, Any]:
  """Returns what a run froze, from where it found it; `source` was read."""
  run, shapes = source.experiment, protocol.shapes(source.config)
  # The run has compared all names. Now only those of the frozen ones matter,
  # and their fingerprint vouches for them.
  params, _ = load_weights(
    *(source.base, source.config, shapes.pop('params'), shapes),
    new=('.*',),
    dropped=('.*',),
  )
  _, frozen = run.split(params)
  arrays = {
    name: np.asarray(x, run.frozen_dtype(name))
    for name, x in trees.flatten(frozen).items()
    if not isinstance(x, jax.ShapeDtypeStruct)
  }
  digest = fingerprint.of_arrays(arrays.items())
  origin_lib.check_frozen(
    source.checkpoint, {origin_lib.FROZEN: digest}, source.base
  )
  return trees.unflatten(arrays)


def from_ours(
  params,
  model_state,
  init: str,
  *,
  step: best.Step = None,
  model: LMConfig | None = None,
  new: Sequence[str] = (),
  dropped: Sequence[str] = (),
  base: str | None = None,
) -> tuple[Any, Any]:
  """Returns variables with values from a run or an exported model.

  Args:
    params: initialised parameters.
    model_state: other initialised collections.
    init: directory of a run or of an exported model.
    step: of the run's checkpoint, or 'best'; None for the newest.
    model: config of a language model, in which other layers may be scanned than
      in the source; None for other models.
    new: regular expressions of names that may be missing from the source, as in
      `trees.merge`; in model_state, names begin with their collection.
    dropped: regular expressions of names that only the source may have.
    base: where the weights are that the source's adapters belong to; None for
      where it says.

  Raises:
    UserError: there is no such model, or its names or shapes do not fit.
  """
  source = source_lib.Source.of_init(init, base=base).at(step)
  if not source.ours:
    raise UserError(
      f'init={init} is neither the workdir of a run nor a file of weights that'
      ' this task can read: give the directory that holds config.json.'
    )
  variables = _variables(source, params)
  source_params = variables.pop('params')
  kwargs = {'new': new, 'dropped': dropped, 'describe': f'init={init}'}
  merge = merge_state = trees.merge
  if model is not None:
    merge = functools.partial(lm.merge, model, source.config)
    merge_state = functools.partial(merge, collections=True)
  params = merge(params, source_params, **kwargs)
  # Collections may hold structs, which are dictionaries on disk.
  flat = trees.by_path(model_state)
  merged = merge_state(trees.unflatten(flat), variables, **kwargs)
  merged = trees.flatten(merged)
  structure = jax.tree.structure(model_state)
  model_state = jax.tree.unflatten(structure, [merged[name] for name in flat])
  return params, model_state


def load_image_weights(
  init: str,
  model,
  params,
  model_state,
  *,
  new: tuple[str, ...] = (),
  dropped: tuple[str, ...] = (),
  whole: bool = False,
) -> tuple[Any, Any]:
  """Returns variables of a vision model with values from a run or checkpoint.

  Position embeddings of another resolution are interpolated. Blocks that a
  shallower model does not have are left out, and heads for other classes, or
  missing from a file, keep their initial values; with `whole` both are errors.

  Args:
    init: the workdir of a run, a folder that `mod_jax.export` wrote, or a
      checkpoint file that `convert.vit` reads.
    model: config of the model.
    params: its initialised parameters.
    model_state: its other initialised collections.
    new: regular expressions of names that may be missing from the source.
    dropped: regular expressions of names that only the source may have.
    whole: whether all weights must come from the source.

  Raises:
    UserError: there are no such weights, or they do not fit.
  """
  source = source_lib.Source.of_init(init)
  fresh, dense = trees.flatten(params), model.dense_twin()
  if source.ours:
    variables = _variables(source, params)
    weights = trees.flatten(variables.pop('params'))
    weights = _fit(weights, fresh, dense, init, truncate=not whole)
  else:
    # Files hold the dense model, and perhaps prediction heads of DynamicViT.
    file_model = model.with_parts(routing=None, adaptive=None, lora=None)
    weights = convert_vit.read(source.path, file_model, truncate=not whole)
    variables = arrays_lib.unflatten(weights)
    weights = trees.flatten(variables.pop('params'))
  heads = {
    name.split('/')[0]
    for name in fresh
    if name.startswith('head') and name not in weights
  }
  if heads and whole:
    raise UserError(
      f'init={init} has no {" and no ".join(sorted(heads))} for'
      f' {dense.num_classes} classes, which a teacher needs: fine-tune it'
      ' first.'
    )
  new = (*new, *(f'{head}/.*' for head in heads))
  kwargs = {'new': new, 'dropped': dropped, 'describe': f'init={init}'}
  merged = trees.merge(params, trees.unflatten(weights), **kwargs)
  return merged, trees.merge(model_state, variables, **kwargs)


def _fit(
  weights, fresh, dense: ViTConfig, init: str, *, truncate: bool
) -> dict[str, Any]:
  """Returns the weights of a run that another model has, by name."""
  fitted = {}
  for name, array in weights.items():
    block = re.match(r'block_(\d+)/', name)
    if truncate and block and int(block[1]) >= dense.num_layers:
      continue
    head = re.fullmatch(r'(head\w*)/(kernel|bias)', name)
    classes = array.shape[-1:]
    # Another width, too, is reported when all shapes are compared.
    if head and name in fresh and classes != fresh[name].shape[-1:]:
      if head[2] == 'kernel':
        logging.warning(
          '%s: %s is made new, for num_classes=%d; the run had %d.',
          *(init, head[1], dense.num_classes, *classes),
        )
      continue
    if name == 'position':
      array = convert_vit.resampled(array, dense)
    fitted[name] = array
  return fitted

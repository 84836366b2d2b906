"""Weights to start from: the weights of another run, or of published files.

Of the other run only the directory is needed, neither its data nor its
tokenizer. Its model may differ from the model to be trained.
"""

from collections.abc import Sequence
import functools
import re
from typing import Any

from absl import logging
import jax
import numpy as np

from mod_jax import trees
from mod_jax.convert import vit as convert_vit
from mod_jax.data import fingerprint
from mod_jax.errors import UserError
from mod_jax.models import lm, lora, protocol
from mod_jax.models.vit import ViTConfig
from mod_jax.pretrained import source as source_lib
from mod_jax.runs import best
from mod_jax.runs import origin as origin_lib

# Beginnings of the names of a classification head's parameters, by kind.
_HEADS = {'vision': ('head',), 'detector': ('classes/',)}


def load_weights(
  init: str,
  model: protocol.StackedConfig | None,
  params,
  model_state,
  *,
  whole: bool = False,
  step: best.Step = None,
  base: str | None = None,
  new: Sequence[str] = (),
  dropped: Sequence[str] = (),
) -> tuple[Any, Any]:
  """Returns params and model_state with values from the weights at `init`.

  Language models may differ in which layers are scanned. For a vision model,
  position embeddings of another resolution are interpolated, and blocks that
  the model does not have are left out. The head of a vision model or of a
  detector keeps its initial values if it is missing at `init` or has another
  number of classes there. The head and the mask embedding of a published
  Wav2Vec2 may be missing, too.

  Args:
    init: directory of a run or of an exported model, or published weights, as
      `pretrained.source.Source` opens them.
    model: config of the model; None accepts only a run, an export or adapters
      of PEFT, and makes none of these changes.
    params: initialised parameters; those that are replaced may be shapes.
    model_state: the model's other collections, initialised likewise.
    whole: whether all weights must come from `init`, as for a teacher: then it
      is an error if a head would keep its initial values, or if blocks would be
      left out.
    step: step of a run's checkpoint, or 'best'; None for the newest.
    base: path of the weights that adapters belong to, or that a run has frozen;
      None for the path that is stored with the adapters or the run.
    new: regular expressions of names that may be missing from the source, as in
      `trees.merge`; in model_state, names begin with their collection.
    dropped: regular expressions of names that only the source may have.

  Raises:
    UserError: there are no such weights, or they are of another kind of model,
      or names or shapes do not fit.
  """
  source = open_init(init, model, base).at(step)
  kind = None if model is None else model.kind
  if source.ours:
    variables = _variables(source, model, params)
  else:
    variables = source.read_for(model, truncate=not whole)
    if kind == 'speech' and not whole:
      new = (*new, 'head/.*', 'mask_embedding')
  fresh = trees.flatten(params)
  weights = trees.flatten(variables.pop('params'))
  if kind == 'vision':
    weights = _fit(weights, model.dense_twin(), truncate=not whole)
  heads = {
    name.split('/')[0]
    for name, x in fresh.items()
    if name.startswith(_HEADS.get(kind, ()))
    # The last axis is the classes. `merge` raises if the width differs.
    and (name not in weights or weights[name].shape[-1:] != x.shape[-1:])
  }
  if heads and whole:
    raise UserError(
      f'init={init} has no {" and no ".join(sorted(heads))} for'
      f' {model.dense_twin().num_classes} classes, which a teacher needs:'
      ' fine-tune it first.'
    )
  for head in heads:
    there = [name for name in weights if name.startswith(f'{head}/')]
    if there:
      logging.warning(
        '%s: %s is made new, for num_classes=%d; the model there has %d.',
        *(init, head, model.dense_twin().num_classes),
        source.config.dense_twin().num_classes,
      )
    for name in there:
      del weights[name]
  new = (*new, *(f'{head}/.*' for head in heads))
  kwargs = {'new': new, 'dropped': dropped, 'describe': f'init={init}'}
  merge = merge_state = trees.merge
  if kind == 'language' and source.ours:
    merge = functools.partial(lm.merge, model, source.config)
    merge_state = functools.partial(merge, collections=True)
  params = merge(params, trees.unflatten(weights), **kwargs)
  if not (source.ours or variables):  # Only parameters were published.
    return params, model_state
  # Collections may hold structs, which are dictionaries on disk.
  flat = trees.by_path(model_state)
  merged = merge_state(trees.unflatten(flat), variables, **kwargs)
  merged = trees.flatten(merged)
  structure = jax.tree.structure(model_state)
  model_state = jax.tree.unflatten(structure, [merged[name] for name in flat])
  return params, model_state


def open_init(
  init: str, model: protocol.StackedConfig | None, base: str | None = None
) -> 'source_lib.Source':
  """Returns the source at `init`, and reads no weights.

  Arguments and errors are those of `load_weights`; names and shapes are not
  compared.
  """
  source = source_lib.Source.of_init(init, base=base)
  kind = None if model is None else model.kind
  found = source.config.kind if source.ours else source.kind
  fits = source.ours if kind is None else found == kind
  if not fits:
    raise UserError(
      f'init={init} holds a model of the kind {found!r}, and one of the kind'
      f' {kind or "run"!r} is needed: give a run or an export of such a model,'
      ' or published weights of one.'
    )
  return source


def _variables(
  source: 'source_lib.Source', model: protocol.StackedConfig | None, params
) -> dict[str, Any]:
  """Returns a source's variables, for a model with the parameters `params`.

  The variables include the parameters that a run froze. Adapters are merged
  into the weights if the model lacks such adapters or has another `lora.alpha`.
  """
  variables = source.read()
  if source.kind == 'run' and source.experiment.train.frozen is not None:
    frozen = _frozen(source)
    variables['params'] = trees.join(variables['params'], frozen)
  found = lora.adapters(variables['params'])
  model = model or source.config
  if found and (
    found != lora.adapters(params)
    or model.lora.alpha != source.config.lora.alpha
  ):
    _, variables['params'] = lora.merge(source.config, variables['params'])
  return variables


def _frozen(source: 'source_lib.Source') -> dict[str, Any]:
  """Reads and checks what a run has frozen; call `source.read` before."""
  run, shapes = source.experiment, protocol.shapes(source.config)
  # All names in the weights that the run started from were compared when it
  # started. Here only the frozen parameters matter, so any other name may be
  # new or dropped; `check_frozen` below compares their fingerprint with that in
  # the run's checkpoint.
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


def _fit(
  weights: dict[str, Any], dense: ViTConfig, *, truncate: bool
) -> dict[str, Any]:
  """Fits weights to the resolution of `dense` and, if `truncate`, its depth."""
  fitted = {}
  for name, array in weights.items():
    block = re.match(r'block_(\d+)/', name)
    if truncate and block and int(block[1]) >= dense.num_layers:
      continue
    if name == 'position':
      array = convert_vit.resampled(array, dense)
    fitted[name] = array
  return fitted

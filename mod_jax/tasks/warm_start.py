"""Weights to start from: those of another run, or of checkpoint files.

Only the directory of the other run is needed, neither its data nor its
tokenizer, and its model may differ from the one to be trained.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
import re
from typing import Any, Literal

from absl import logging
from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import errors, paths, trees
from mod_jax.convert import files
from mod_jax.convert import vit as convert_vit
from mod_jax.convert.entry import Lazy
from mod_jax.models import lm
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig, resize_positions
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import restore_named
from mod_jax.tasks.experiment import ExperimentConfig

# The files of a folder that `mod_jax.export` writes in our own format.
FOLDER, WEIGHTS = 'mod_jax.json', 'model.safetensors'


def is_workdir(path) -> bool:
  """Whether a path is the directory of one of our runs."""
  return workdir_lib.holds_run(path)


def is_folder(path) -> bool:
  """Whether a path is a folder that `mod_jax.export` wrote in our format."""
  return (workdir_lib.expand(path) / FOLDER).is_file()


def is_ours(path) -> bool:
  """Whether a path is the directory of a run, or a folder in our format."""
  return is_workdir(path) or is_folder(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
  """Metadata of an exported model, except the preprocessing of images.

  Attributes:
    model: config of the model.
    experiment: config of the run that trained it; for foreign language models
      it says how text is read, for foreign vision models it is None.
    classes: names of the classes, of a vision model; None if unknown.
    tokenizer: kind of the one that lies in the folder, of a language model.
    foreign: whether a language model was published by others and not trained
      further, so that prompts begin as its own tokenizer begins texts.
  """

  model: LMConfig | ViTConfig | DynamicViTConfig
  experiment: ExperimentConfig | None = None
  classes: tuple[str, ...] | None = None
  tokenizer: Literal['bytes', 'sentencepiece', 'huggingface'] | None = None
  foreign: bool = False


def read_folder(path) -> tuple[Folder, Any]:
  """Returns the metadata of an exported model, and its image preprocessing.

  Raises:
    UserError: the folder is not what `mod_jax.export` writes.
  """
  file = workdir_lib.expand(path) / FOLDER
  fields = paths.read_object(file)
  experiment = fields.get('experiment')
  if isinstance(experiment, dict):
    fields['experiment'] = {k: experiment[k] for k in experiment if k != 'type'}
  folder = config_lib.from_known(Folder, fields, file)
  language = isinstance(folder.model, LMConfig)
  experiment, pictures = folder.experiment, fields.get('preprocess')
  if (
    (experiment is not None and experiment.model != folder.model)
    or (language and (experiment is None or folder.tokenizer is None))
    or (not language and not isinstance(pictures, dict))
  ):
    raise errors.UserError(
      f'{file}: its parts do not fit each other: export the model again.'
    )
  return folder, pictures


def model_config(path) -> LMConfig | ViTConfig | DynamicViTConfig:
  """Returns the config of the model in a run's directory or our folder."""
  if is_workdir(path):
    return workdir_lib.read_config(path, ExperimentConfig).model
  return read_folder(path)[0].model


def read(path) -> tuple[Any, Any]:
  """Returns parameters and model_state in a run's directory or our folder.

  Raises:
    UserError: there are no usable weights.
  """
  if is_workdir(path):
    return read_workdir(path)[1:]
  # Lazily, so that arrays are read one by one when they are placed.
  stored = files.stored(workdir_lib.expand(path))
  arrays = {name: Lazy(x.shape, x.read) for name, x in stored.items()}
  variables = trees.unflatten(arrays)
  return variables.pop('params'), variables


def read_workdir(path) -> tuple[ExperimentConfig, Any, Any]:
  """Returns config, parameters and model_state of a run; writes nothing.

  Both trees are nested dictionaries of arrays, from the newest checkpoint of a
  run that may still be training. The parameters are those that are evaluated:
  moving averages, if the run keeps any.

  Raises:
    UserError: there is no run, or no usable checkpoint, or weights that are not
      finite, or the run's config was edited since.
  """
  path = workdir_lib.expand(path)
  config = workdir_lib.read_config(path, ExperimentConfig)
  params = 'ema' if config.train.ema_decay else 'params'
  restored = restore_named(
    workdir_lib.checkpoints(path),
    (params, 'model_state'),
    check=functools.partial(origin_lib.check_config, path, config),
  )
  if restored is None:
    raise errors.UserError(
      f'{path} holds no checkpoint yet, so there are no weights to start from:'
      ' train it for longer.'
    )
  state = restored.state
  for name, array in trees.by_path(state).items():
    files.check_finite(array, path, name)
  return config, state[params], state['model_state']


def is_adaptive(init: str) -> bool:
  """Whether `init` is a run or a folder of ours with an adaptive model."""
  path = workdir_lib.find(init)
  return is_ours(path) and model_config(path).adaptive is not None


def is_routed(init: str) -> bool:
  """Whether `init` is a run or a folder of ours with a routed model."""
  path = workdir_lib.find(init)
  return is_ours(path) and model_config(path).routing is not None


def from_ours(
  params,
  model_state,
  init: str,
  *,
  model: LMConfig | None = None,
  new: Sequence[str] = (),
  dropped: Sequence[str] = (),
) -> tuple[Any, Any]:
  """Returns variables with values from a run or an exported model.

  Args:
    params: initialised parameters.
    model_state: other initialised collections.
    init: directory of the run, or of the exported model.
    model: config of a language model, in which other layers may be scanned than
      in the source; None for other models.
    new: regular expressions of names that may be missing from the source, as in
      `trees.merge`; in model_state, names begin with their collection.
    dropped: regular expressions of names that only the source may have.

  Raises:
    UserError: there is no such model, or its names or shapes do not fit.
  """
  path = workdir_lib.find(init)
  if not is_ours(path):
    raise errors.UserError(
      f'init={init} is neither the workdir of a run nor a file of weights that'
      ' this task can read: give the directory that holds config.json.'
    )
  source_params, source_state = read(path)
  kwargs = {'new': new, 'dropped': dropped, 'describe': f'init={init}'}
  # Collections may hold structs, which are dictionaries on disk.
  flat = trees.by_path(model_state)
  fresh_state = trees.unflatten(flat)
  if model is None:
    params = trees.merge(params, source_params, **kwargs)
    merged = trees.merge(fresh_state, source_state, **kwargs)
  else:
    merge = functools.partial(lm.merge, model, model_config(path))
    params = merge(params, source_params, **kwargs)
    merged = merge(fresh_state, source_state, collections=True, **kwargs)
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
  path = workdir_lib.find(init)
  dense = model.dense_twin()
  fresh = trees.flatten(params)
  if is_ours(path):
    source, statistics = read(path)
    source, heads = _fit(
      trees.flatten(source), fresh, dense, init, truncate=not whole
    )
  else:
    # Files hold the dense model, and perhaps prediction heads of DynamicViT.
    file_model = model.with_parts(routing=None, adaptive=None)
    source = convert_vit.read(path, file_model, truncate=not whole)
    statistics = trees.unflatten(
      {n: source.pop(n) for n in list(source) if n.startswith('batch_stats/')}
    )
    heads = {
      name.split('/')[0]
      for name in fresh
      if name.startswith('head') and name not in source
    }
  if heads and whole:
    raise errors.UserError(
      f'init={init} has no {" and no ".join(sorted(heads))} for'
      f' {dense.num_classes} classes, which a teacher needs: fine-tune it'
      ' first.'
    )
  new = (*new, *(f'{head}/.*' for head in heads))
  kwargs = {'new': new, 'dropped': dropped, 'describe': f'init={init}'}
  merged = trees.merge(params, trees.unflatten(source), **kwargs)
  return merged, trees.merge(model_state, statistics, **kwargs)


def variable_shapes(model) -> tuple[Any, Any]:
  """Returns shapes of a model's parameters and of its other collections."""
  init = model.build().init
  shapes = jax.eval_shape(lambda: init(jax.random.key(0), model.example()))
  shapes = dict(nn.unbox(shapes))
  return shapes.pop('params'), shapes


def _fit(
  source, fresh, dense: ViTConfig, init: str, *, truncate: bool
) -> tuple[dict[str, Any], set[str]]:
  """Returns the weights of a run that fit another model, by name.

  Also returns the names of heads for other classes, which are left out.
  """
  source = dict(source)
  if 'position' in source:
    patches = source['position'].shape[0] - dense.num_prefix
    # A number that is no square belongs to another kind of model, which is
    # reported when all shapes are compared.
    if patches > 0 and math.isqrt(patches) ** 2 == patches:
      source['position'] = resize_positions(
        jnp.asarray(source['position']), dense.num_prefix, dense.grid
      )
  for name in list(source):
    block = re.match(r'block_(\d+)/', name)
    if truncate and block and int(block[1]) >= dense.num_layers:
      del source[name]
  heads = set()
  for name in list(source):
    head = re.fullmatch(r'(head\w*)/kernel', name)
    if not head or name not in fresh:
      continue
    *width, classes = source[name].shape
    if [*width, dense.num_classes] != list(fresh[name].shape):
      continue  # Another width, also reported when shapes are compared.
    if classes == dense.num_classes:
      continue
    logging.warning(
      '%s: %s is made new, for num_classes=%d; the run had %d.',
      *(init, head[1], dense.num_classes, classes),
    )
    heads.add(head[1])
    for part in (name, f'{head[1]}/bias'):
      del source[part]
  return source, heads

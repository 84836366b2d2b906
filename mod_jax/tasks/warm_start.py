"""Weights to start from: what a run of ours has learnt, without its task.

Nothing of the other run is needed but its directory: neither its data nor its
tokenizer, and its model may be another one than is about to be trained.
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
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import origin as origin_lib
from mod_jax.train import workdir as workdir_lib
from mod_jax.train.checkpoints import restore_named

# The files of a folder in our own format, which `mod_jax.export` writes.
FOLDER, WEIGHTS = 'mod_jax.json', 'model.safetensors'


def is_workdir(path) -> bool:
  """Whether a path is the directory of one of our runs."""
  return workdir_lib.holds_run(path)


def is_folder(path) -> bool:
  """Whether a path is a folder that `mod_jax.export` wrote in our format."""
  return (workdir_lib.expand(path) / FOLDER).is_file()


def is_ours(path) -> bool:
  """Whether a path holds a model of ours: a run, or a folder of its own."""
  return is_workdir(path) or is_folder(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
  """What the folder of an exported model says of it, pictures aside.

  Attributes:
    model: its config.
    experiment: the run that trained it, or of a language model how it reads;
      None of a vision model of somebody else's.
    classes: as of a `Run`.
    tokenizer: kind of the one that lies in the folder, of a language model.
    foreign: as of a `Run`.
  """

  model: LMConfig | ViTConfig | DynamicViTConfig
  experiment: ExperimentConfig | None = None
  classes: tuple[str, ...] | None = None
  tokenizer: Literal['bytes', 'sentencepiece', 'huggingface'] | None = None
  foreign: bool = False


def read_folder(path) -> tuple[Folder, Any]:
  """Returns what the folder of an exported model says, and of its pictures.

  Raises:
    UserError: it is not what `mod_jax.export` writes.
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
  """Returns the config of the model of ours that a path holds."""
  if is_workdir(path):
    return workdir_lib.read_config(path, ExperimentConfig).model
  return read_folder(path)[0].model


def read(path) -> tuple[Any, Any]:
  """Returns parameters and model_state of the model of ours at a path.

  Raises:
    UserError: as of `read_workdir`, or the file of weights cannot be read.
  """
  if is_workdir(path):
    return read_workdir(path)[1:]
  # Read when they are placed, one after another.
  stored = files.stored(workdir_lib.expand(path))
  arrays = {name: Lazy(x.shape, x.read) for name, x in stored.items()}
  variables = trees.unflatten(arrays)
  return variables.pop('params'), variables


def read_workdir(path) -> tuple[ExperimentConfig, Any, Any]:
  """Returns config, parameters and model_state of a run, and changes nothing.

  Both trees are nested dictionaries of arrays, from the newest checkpoint of a
  run that may still be going on. The parameters are those that it would be
  evaluated with: averages, if it keeps any.

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
  """Whether `init` is a model of ours that is adaptive already."""
  path = workdir_lib.find(init)
  return is_ours(path) and model_config(path).adaptive is not None


def is_routed(init: str) -> bool:
  """Whether `init` is a model of ours that is routed already."""
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
  """Returns fresh variables with a model's arrays in place of their own.

  Args:
    params: fresh parameters.
    model_state: other fresh collections.
    init: directory of a run of ours, or of a model that was exported.
    model: of a language model, its config: other layers may be scanned in it.
    new: as of `trees.merge`; names in model_state begin with their collection.
    dropped: likewise.

  Raises:
    UserError: there is no model of ours at that path, or its names or shapes
      do not fit.
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
  """Returns fresh variables with the weights of a run or checkpoint in them.

  Position embeddings of another resolution are interpolated. Blocks that a
  shallower model does not have are left out, and heads for other classes, or
  that a file lacks, stay fresh; with `whole` both are refused. `init` is the
  workdir of a run, a folder that `mod_jax.export` wrote, or a checkpoint file
  that `convert.vit` reads. The other arguments are those of
  `modality.Modality.load_weights`.

  Raises:
    UserError: no such weights, or they do not fit.
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
    # Prediction heads are all that a file may hold beside the dense model.
    of_file = model.with_parts(routing=None, adaptive=None)
    source = convert_vit.read(path, of_file, truncate=not whole)
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
  """Returns the weights of a run that another model can use, by name.

  Beside them the names of the heads that are left out, being for other classes.
  """
  source = dict(source)
  if 'position' in source:
    patches = source['position'].shape[0] - dense.num_prefix
    # A number that is no square belongs to another kind of model, which the
    # comparison of all shapes will say.
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
      continue  # Of another width, which the comparison will say, too.
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

"""Low-rank adapters in the format of Hugging Face's PEFT.

A folder holds `adapter_model.safetensors` and `adapter_config.json`; the model
that the adapters belong to is elsewhere. Language models have the names of
`convert.lm`, and vision transformers those of Hugging Face in `convert.vit`. A
vision model's heads may be stored as a whole, as PEFT's `modules_to_save`.
"""

import os
import pathlib
import re
from typing import Any

from flax import linen as nn
import numpy as np

from mod_jax import paths, trees
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import files
from mod_jax.convert import lm as convert_lm
from mod_jax.convert import vit as convert_vit
from mod_jax.convert.arrays import Entry
from mod_jax.errors import UserError
from mod_jax.layers.lora import PARAMETERS, LoRAConfig
from mod_jax.models import lm
from mod_jax.models.lm import LMConfig

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# PEFT's prefix of the names of the model's modules.
_PREFIX = 'base_model.model.'
# Maps our names of an adapter's two matrices to PEFT's.
_MATRICES = {'down': 'lora_A', 'up': 'lora_B'}
# Supported values of the settings that change what the adapters compute without
# changing the name or shape of any array.
_MUST_BE = {
  'peft_type': ('LORA',),
  'use_dora': (False, None),
  'alpha_pattern': ({}, None),
  'layer_replication': (None,),
  'alora_invocation_tokens': (None,),
  # Other values (PiSSA, OLoRA, CorDA, LoftQ) change the base model's weights.
  'init_lora_weights': (True, False, 'gaussian', 'eva', 'orthogonal', None),
}


def holds_adapters(path: str | os.PathLike) -> bool:
  """Returns whether a path is a folder with adapters of PEFT."""
  return (pathlib.Path(path) / CONFIG).is_file()


def _fields(folder) -> dict[str, Any]:
  return paths.read_object(pathlib.Path(folder) / CONFIG)


def base_of(folder: str | os.PathLike) -> str:
  """Returns the folder of the model that the adapters in `folder` belong to.

  Raises:
    UserError: the adapters' config names no folder that exists.
  """
  base = _fields(folder).get('base_model_name_or_path')
  if not isinstance(base, str) or not os.path.exists(base):
    raise UserError(
      f'{folder}/{CONFIG}: base_model_name_or_path={base!r} is no folder here:'
      ' say where the model is that the adapters belong to, by'
      " mod_jax.load(…, base='FOLDER') or in that file."
    )
  return base


def derive(folder: str | os.PathLike, base):
  """Returns the config `base` with a folder's adapters and number of classes.

  Raises:
    UserError: the adapters are not supported, or belong to another model.
  """
  fields, where = _fields(folder), f'{folder}/{CONFIG}'
  for key, allowed in _MUST_BE.items():
    value = fields.get(key)
    if value not in allowed:
      raise UserError(
        f'{where}: {key}={value!r} changes what the adapters compute, and is'
        f' not supported; expected {allowed[0]!r}.'
      )
  rank, alpha = fields.get('r'), fields.get('lora_alpha')
  if not isinstance(rank, int) or not isinstance(alpha, int | float):
    raise UserError(
      f'{where}: r={rank!r} and lora_alpha={alpha!r}: expected two numbers.'
    )
  if fields.get('use_rslora'):
    alpha *= rank**0.5  # rsLoRA divides by the rank's root, we by the rank.
  arrays = _arrays(folder, base)
  maps = [
    _module(entry)
    for entry in _entries(base)
    if entry.ours[0].startswith('block_')
    and _key(entry.theirs, 'down') in arrays
  ]
  if not maps:
    raise UserError(
      f'{folder} holds no adapter of this model: its first names are'
      f' {", ".join(sorted(arrays)[:3]) or "none"}; give the model that it'
      ' belongs to as base.'
    )
  parts = {'lora': LoRAConfig(rank=rank, alpha=alpha, maps=_patterns(maps))}
  head = arrays.get('classifier.bias')
  if head is not None:
    parts['num_classes'] = len(head)
  return base.with_parts(**parts)


def _patterns(maps: list[str]) -> tuple[str, ...]:
  """Returns regular expressions that match these names of linear maps only."""
  blocks = {}
  for name in maps:
    block, _, kind = name.partition('/')
    blocks.setdefault(kind, []).append(block.removeprefix('block_'))
  kinds = {}
  for kind, numbers in blocks.items():
    kinds.setdefault(tuple(numbers), []).append(kind)
  return tuple(
    f'block_({"|".join(numbers)})/({"|".join(group)})'
    for numbers, group in kinds.items()
  )


def _entries(config) -> tuple[Entry, ...]:
  if isinstance(config, LMConfig):
    return convert_lm.names(config)
  return convert_vit.names(config, 'huggingface')


def _module(entry: Entry) -> str:
  """Returns our name of the linear map whose kernel is in an entry."""
  return entry.ours[0].removesuffix('/kernel')


def _key(theirs: str, matrix: str) -> str:
  return f'{theirs.removesuffix("weight")}{_MATRICES[matrix]}.weight'


def _arrays(folder, config) -> dict[str, np.ndarray]:
  """Returns the arrays in a folder by name, without PEFT's prefix."""
  file = pathlib.Path(folder) / WEIGHTS
  if not file.is_file():
    raise UserError(
      f'{folder} lacks {WEIGHTS}: save the adapters as safetensors.'
    )
  arrays = {}
  for name, array in files.read(file).items():
    name = name.removeprefix(_PREFIX)
    if not isinstance(config, LMConfig):
      name = convert_vit.on_disk(name)
    arrays[name] = array
  return arrays


def read(folder: str | os.PathLike, config) -> dict[str, np.ndarray]:
  """Returns our parameters in a folder by name: adapters, and any heads.

  Raises:
    UserError: the arrays do not fit `config`; the message lists why.
  """
  shapes = arrays_lib.shapes_of(config)
  arrays, expected, ours = _arrays(folder, config), {}, {}
  for entry in _entries(config):
    if entry.theirs in arrays and entry.ours[0].startswith('head'):
      expected[entry.theirs] = entry.their_shape
      ours[entry.theirs] = entry.ours[0]
    for matrix in _MATRICES:
      name = f'{_module(entry)}_lora/{matrix}/kernel'
      if name in shapes:
        key, shape = _key(entry.theirs, matrix), shapes[name]
        # The rank is the last axis of our first matrix, and the first axis of
        # our second. PEFT's matrices are transposed.
        rank = config.lora.rank
        size = int(np.prod(shape)) // rank
        expected[key] = (rank, size) if matrix == 'down' else (size, rank)
        ours[key] = name
  trees.compare(
    expected,
    {name: array.shape for name, array in arrays.items()},
    describe=f'{folder}, adapters of PEFT,',
  )
  # Kernels of heads are transposed too. Transposition does not change biases.
  return {
    name: arrays[key].T.reshape(shapes[name]) for key, name in ours.items()
  }


def save(folder: str | os.PathLike, params, config, base: str | None) -> None:
  """Writes a model's adapters, and a vision model's heads, for PEFT.

  Vision transformers get the names of transformers 5. `base` is the path of the
  model that the adapters belong to; None if unknown.

  Raises:
    UserError: Hugging Face has no such model, or PEFT no such adapters.
  """
  folder = pathlib.Path(folder).expanduser()
  language = isinstance(config, LMConfig)
  if language:
    _, params = lm.unrolled(config, params)
  flat = trees.flatten(nn.unbox(params))
  arrays, targets, whole = {}, [], []

  def spelled(name):
    return name if language else convert_vit.in_memory(name, config)

  for entry in _entries(config.dense_twin()):
    if entry.ours[0].startswith('head') and not language:
      array = np.asarray(flat[entry.ours[0]], np.float32)
      name = spelled(entry.theirs)
      arrays[f'{_PREFIX}{name}'] = entry.to_theirs(array)
      whole.append(name.rpartition('.')[0])
    if f'{_module(entry)}_lora/down/kernel' not in flat:
      continue
    theirs = spelled(entry.theirs)
    targets.append(theirs.removesuffix('.weight'))
    for matrix in _MATRICES:
      array = flat[f'{_module(entry)}_lora/{matrix}/kernel']
      array = np.asarray(array, np.float32)
      rank = config.lora.rank
      two = (-1, rank) if matrix == 'down' else (rank, -1)
      arrays[f'{_PREFIX}{_key(theirs, matrix)}'] = array.reshape(two).T
  left = sum(bool(re.fullmatch(PARAMETERS, name)) for name in flat)
  if left != 2 * len(targets):
    raise UserError(
      'PEFT has no adapters of experts or learners: export the model, with its'
      " adapters merged, as 'safetensors'."
    )
  alpha = config.lora.alpha
  files.write(folder / WEIGHTS, arrays)
  files.write_json(
    folder / CONFIG,
    {
      'peft_type': 'LORA',
      'task_type': 'CAUSAL_LM' if language else None,
      'base_model_name_or_path': base,
      'r': config.lora.rank,
      'lora_alpha': int(alpha) if alpha == int(alpha) else alpha,
      'lora_dropout': 0.0,
      'target_modules': targets,
      'modules_to_save': sorted(set(whole)) or None,
      'bias': 'none',
      'fan_in_fan_out': False,
      'inference_mode': True,
    },
  )

"""LLaVA 1.5 in the naming of Hugging Face.

Reads and writes directories in the format of `transformers`. `convert.lm` and
`convert.clip` convert the language model and CLIP's tower; names of arrays have
an additional prefix here.
"""

from collections.abc import Callable, Mapping
import dataclasses
import os
import pathlib
import re
from typing import Any, Literal

from flax import linen as nn
import numpy as np

from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import clip, files
from mod_jax.convert import lm as convert_lm
from mod_jax.convert.files import Lazy
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import UserError, require
from mod_jax.models import protocol
from mod_jax.models.vlm import VLMConfig

# Prefixes of names on disk, by our name of the part of the model. The tower's
# may be followed by `clip.PREFIX`.
_PARTS = {
  'language': 'language_model.',
  'tower': 'vision_tower.',
  'projector': 'multi_modal_projector.',
}
# Patterns of prefixes in transformers 5's modules, and the prefixes on disk.
_IN_MEMORY = (
  (r'model\.language_model\.', 'language_model.model.'),
  (r'lm_head\.', 'language_model.lm_head.'),
  (r'model\.(vision_tower|multi_modal_projector)\.', r'\1.'),
  (r'vision_tower\.vision_model\.', 'vision_tower.'),
)
_PROJECTOR = {'linear_1': 'linear_1.', 'linear_2': 'linear_2.'}
# Defaults of transformers for fields that `text_config` lacks.
_LLAMA = {
  'model_type': 'llama',
  'vocab_size': 32000,
  'hidden_size': 4096,
  'intermediate_size': 11008,
  'num_hidden_layers': 32,
  'num_attention_heads': 32,
}
# Files that `save` copies: the language model's, and the preprocessing's.
_BESIDE = (
  *convert_lm.BESIDE,
  *('preprocessor_config.json', 'processor_config.json'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """The fields of a `config.json` that are read, except `text_config` etc."""

  image_token_index: config_lib.Count | None = None
  image_token_id: config_lib.Count | None = None  # Name in newer files.
  vision_feature_layer: int = -2
  # Other values keep the class token or are of other projectors.
  vision_feature_select_strategy: Literal['default'] = 'default'
  projector_hidden_act: Literal['gelu'] = 'gelu'
  multimodal_projector_bias: Literal[True] = True


def derive(folder: str | os.PathLike) -> VLMConfig:
  """Returns the config of the model in a directory of Hugging Face.

  Raises:
    UserError: there is no `config.json`, or a part of the model is not
      supported.
  """
  return _from_fields(files.config_json(folder), f'{folder}/config.json')


def _from_fields(fields: Mapping[str, Any], where: str) -> VLMConfig:
  theirs = config_lib.from_known(_Fields, fields, where)
  image_token = theirs.image_token_index
  image_token = theirs.image_token_id if image_token is None else image_token
  text = _LLAMA | clip.part(fields, 'text_config', where)
  vision = clip.part(fields, 'vision_config', where)
  with config_lib.inside(where):
    return VLMConfig(
      tower=clip.from_fields(vision, f'{where}: vision_config'),
      language=convert_lm.from_fields(text, f'{where}: text_config'),
      image_token=32000 if image_token is None else image_token,
      feature_layer=theirs.vision_feature_layer,
    )


def max_length(folder: str | os.PathLike) -> int:
  """Returns the longest input in tokens, as a folder's `config.json` has it."""
  where = f'{folder}/config.json'
  text = _LLAMA | clip.part(files.config_json(folder), 'text_config', where)
  return convert_lm.length_of(text, f'{where}: text_config')


def _on_disk(name: str) -> str:
  """Converts an array's name in transformers' modules to the name on disk."""
  for pattern, replacement in _IN_MEMORY:
    name = re.sub(f'^{pattern}', replacement, name)
  return name


def _projector(config: VLMConfig):
  params = protocol.shapes(config.dense_twin())['params']['projector']
  shapes = {name: x.shape for name, x in trees.flatten(params).items()}
  return arrays_lib.entries(shapes, _PROJECTOR, 'LLaVA')


def read(folder: str | os.PathLike, config: VLMConfig) -> dict[str, Lazy]:
  """Returns the dense parameters of a model by name, read lazily.

  Raises:
    UserError: files are missing, or their arrays do not fit `config`; the
      message lists all differences in a part.
  """
  stored = {_on_disk(n): x for n, x in files.stored(folder).items()}
  by_part = {
    part: {
      name.removeprefix(prefix): x
      for name, x in stored.items()
      if name.startswith(prefix)
    }
    for part, prefix in _PARTS.items()
  }
  known = sum(map(len, by_part.values()))
  if known < len(stored):
    prefixes = tuple(_PARTS.values())
    name = next(name for name in stored if not name.startswith(prefixes))
    raise UserError(
      f'{folder} holds {name}, which belongs to no part of a LLaVA: fetch it'
      ' from where it was published.'
    )
  parts = {
    'projector': arrays_lib.read(
      *(_projector(config), by_part['projector']),
      describe=f'{folder}, the projector,',
    ),
    'language': convert_lm.read(folder, config.language, by_part['language']),
    'tower': clip.read(folder, config.tower, by_part['tower']),
  }
  return {
    f'{part}/{name}': x
    for part, arrays in parts.items()
    for name, x in arrays.items()
  }


def save(
  folder: str | os.PathLike,
  params,
  config: VLMConfig,
  *,
  like: str | os.PathLike | None = None,
  length: int = 2048,
  tokenizer: Tokenizer | None = None,
) -> None:
  """Writes a model, without its routers, in the format of Hugging Face.

  Arguments and errors are those of `convert.lm.save`. If the `config.json` of
  `like` is used, arrays also get the names that they have in `like`.
  """
  dense, folder = config.dense_twin(), pathlib.Path(folder).expanduser()
  fields = _config_json(dense, length, tokenizer)
  types, names = {}, {}
  if like is not None and derive(like) == _from_fields(fields, 'config.json'):
    like = pathlib.Path(like).expanduser()
    fields = files.config_json(like)
    for name, array in files.stored(like).items():
      names[_on_disk(name)], types[_on_disk(name)] = name, array.stored
    convert_lm.copy_beside(like, folder, _BESIDE)
  written = []
  for name, *rest in _arrays(params, dense, types):
    new = name.replace('vision_tower.', f'vision_tower.{clip.PREFIX}', 1)
    written.append((names.get(name, new), *rest))
  files.write_sharded(folder, written)
  files.write_json(folder / 'config.json', fields)


def _arrays(
  params, dense: VLMConfig, types
) -> list[tuple[str, int, Callable[[], np.ndarray]]]:
  """Returns a model's dense arrays as `files.write_sharded` takes them.

  Names have the prefixes in `_PARTS`; the tower's names lack `clip.PREFIX`.
  """

  def of(part):
    prefix = _PARTS[part]
    return {
      name.removeprefix(prefix): kind
      for name, kind in types.items()
      if name.startswith(prefix)
    }

  params = nn.unbox(params)
  flat = trees.flatten(params['projector'])
  by_part = {
    'language': convert_lm.arrays(
      params['language'], dense.language, of('language')
    ),
    'projector': arrays_lib.arrays(_projector(dense), flat, of('projector')),
    'tower': clip.arrays(params['tower'], dense.tower, of('tower')),
  }
  return [
    (_PARTS[part] + name, *rest)
    for part, arrays in by_part.items()
    for name, *rest in arrays
  ]


def _config_json(dense: VLMConfig, length: int, tokenizer) -> dict[str, Any]:
  """Returns the fields of a new `config.json`."""
  text = convert_lm.fields_of(dense.language, length, tokenizer)
  require(
    dense.pooling == 1 and dense.has_grid,
    'pooling=1 and a tower that leaves all patches, as LLaVA has: such a model'
    ' has no file of its format',
    pooling=dense.pooling,
    **{'patches of a picture': dense.num_patches},
  )
  return {
    'architectures': ['LlavaForConditionalGeneration'],
    'model_type': 'llava',
    'text_config': text,
    'vision_config': clip.fields_of(dense.tower),
    'image_token_index': dense.image_token,
    'image_seq_length': dense.num_patches,
    'vision_feature_layer': dense.feature_layer,
    'vision_feature_select_strategy': 'default',
    'projector_hidden_act': 'gelu',
    'multimodal_projector_bias': True,
    'tie_word_embeddings': dense.language.tied_head,
    'torch_dtype': 'float32',
  }

"""CLIP's vision tower in the naming of Hugging Face.

The tower is a `ViT` without a head, with quick-GELU, a layer norm before the
first block and no bias in the patch embedding. The arrays of a tower by itself,
in a whole CLIP or in another model, such as LLaVA, differ only in the prefixes
of their names.
"""

from collections.abc import Callable, Mapping
import dataclasses
import os
import pathlib
from typing import Any, Literal

from flax import linen as nn
import numpy as np

from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import files
from mod_jax.convert.files import Lazy
from mod_jax.errors import UserError
from mod_jax.models.vit import ViTConfig

# Maps our names to Hugging Face's, for `arrays.entries`.
_TABLE = {
  'class_token': 'embeddings.class_embedding',
  'position': 'embeddings.position_embedding.weight',
  'patch': 'embeddings.patch_embedding.',
  'input_norm': 'pre_layrnorm.',  # Spelt like this in Hugging Face's code.
  'block_{}/attention_norm': 'encoder.layers.{}.layer_norm1.',
  'block_{}/attention/query': 'encoder.layers.{}.self_attn.q_proj.',
  'block_{}/attention/key': 'encoder.layers.{}.self_attn.k_proj.',
  'block_{}/attention/value': 'encoder.layers.{}.self_attn.v_proj.',
  'block_{}/attention/out': 'encoder.layers.{}.self_attn.out_proj.',
  'block_{}/mlp_norm': 'encoder.layers.{}.layer_norm2.',
  'block_{}/mlp/up': 'encoder.layers.{}.mlp.fc1.',
  'block_{}/mlp/down': 'encoder.layers.{}.mlp.fc2.',
  'norm': 'post_layernorm.',
}
# Prefix of the tower's names in published files; transformers 5 omits it.
PREFIX = 'vision_model.'
# Arrays to ignore: other parts of a whole CLIP, and a buffer in old files.
_UNUSED = (
  r'(text_model|text_projection|visual_projection)\..*',
  r'logit_scale|embeddings\.position_ids',
)
# Fields of `ViTConfig` that have the same value for all towers.
_FIXED = {
  'num_classes': 0,
  'activation': 'quick_gelu',
  'patch_bias': False,
  'input_norm': True,
  'qkv_bias': True,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """The fields that are read from a config, with Hugging Face's defaults."""

  hidden_size: config_lib.Width = 768
  intermediate_size: config_lib.Size = 3072
  num_hidden_layers: config_lib.Unrolled = 12
  num_attention_heads: config_lib.Size = 12
  image_size: config_lib.Pixels = 224
  patch_size: config_lib.Pixels = 32
  layer_norm_eps: config_lib.Epsilon = 1e-5
  hidden_act: Literal['quick_gelu'] = 'quick_gelu'
  num_channels: Literal[3] = 3


# Maps fields of `ViTConfig` to `_Fields`.
_SAME = {
  'width': 'hidden_size',
  'mlp_dim': 'intermediate_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'image_size': 'image_size',
  'patch_size': 'patch_size',
  'norm_epsilon': 'layer_norm_eps',
}


def derive(folder: str | os.PathLike) -> ViTConfig:
  """Returns the config of the tower in a directory of Hugging Face.

  Raises:
    UserError: there is no `config.json`, or its tower is not supported.
  """
  fields = files.config_json(folder)
  where = f'{pathlib.Path(folder).expanduser()}/config.json'
  if 'vision_config' in fields:
    fields = part(fields, 'vision_config', where)
  return from_fields(fields, where)


def part(fields: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
  """Returns the config of one model, such as 'vision_config', from `fields`.

  `where` is the name of the file, for messages.
  """
  found = fields.get(name)
  if not isinstance(found, dict):
    raise UserError(f'{where}: {name}={found!r}; expected an object of fields.')
  return found


def from_fields(fields: Mapping[str, Any], where: str) -> ViTConfig:
  """Returns the config of a tower from the fields of Hugging Face's config."""
  theirs = config_lib.from_known(_Fields, fields, where)
  ours = {name: getattr(theirs, field) for name, field in _SAME.items()}
  with config_lib.inside(where):
    return ViTConfig(**ours, **_FIXED)


def fields_of(config: ViTConfig) -> dict[str, Any]:
  """Returns the fields of Hugging Face's config of a tower.

  Raises:
    UserError: no tower of CLIP has such a config.
  """
  dense = config.dense_twin()
  for name, value in {**_FIXED, 'stem': None, 'residual_scale': 1.0}.items():
    if getattr(dense, name) != value:
      raise UserError(
        f'{name}={getattr(dense, name)!r}: towers of CLIP have {name}='
        f"{value!r}; export this model as 'safetensors'."
      )
  ours = {field: getattr(dense, name) for name, field in _SAME.items()}
  ours['intermediate_size'] = dense.block.mlp.hidden
  return {
    'model_type': 'clip_vision_model',
    **ours,
    'hidden_act': 'quick_gelu',
    'num_channels': 3,
  }


def _entries(config: ViTConfig):
  shapes = arrays_lib.shapes_of(config.dense_twin())
  return arrays_lib.entries(shapes, _TABLE, 'CLIP')


def read(
  folder: str | os.PathLike,
  config: ViTConfig,
  stored: Mapping[str, Lazy] | None = None,
) -> dict[str, Lazy]:
  """Returns the parameters of a tower by name, read lazily.

  `stored` are the tower's arrays by name, with or without `PREFIX`; None means
  the arrays of the safetensors in `folder`.

  Raises:
    UserError: files are missing, or their arrays do not fit `config`; the
      message lists all differences.
  """
  stored = files.stored(folder) if stored is None else stored
  stored = {name.removeprefix(PREFIX): x for name, x in stored.items()}
  return arrays_lib.read(
    *(_entries(config), stored),
    dropped=_UNUSED,
    describe=f"{folder}, CLIP's vision tower,",
  )


def arrays(
  params, config: ViTConfig, types: Mapping[str, str]
) -> list[tuple[str, int, Callable[[], np.ndarray]]]:
  """Returns a tower's arrays as `files.write_sharded` takes them.

  Names lack `PREFIX`. `types` are those of `convert.arrays.arrays`.

  Raises:
    UserError: the parameters are not those of the config.
  """
  flat = trees.flatten(nn.unbox(params))
  dropped = (r'(block_\d+/)?router/.*',)
  return arrays_lib.arrays(_entries(config), flat, types, dropped)


def save(folder: str | os.PathLike, params, config: ViTConfig) -> None:
  """Writes a directory that `CLIPVisionModel.from_pretrained` reads.

  Routers are left out. Errors are those of `fields_of` and `arrays`.
  """
  folder = pathlib.Path(folder).expanduser()
  fields = {'architectures': ['CLIPVisionModel'], **fields_of(config)}
  written = [
    (PREFIX + name, *rest) for name, *rest in arrays(params, config, {})
  ]
  files.write_sharded(folder, written)
  files.write_json(folder / 'config.json', fields)

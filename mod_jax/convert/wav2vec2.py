"""Wav2Vec2 in the naming of Hugging Face: base, large and XLS-R.

Hugging Face stores the kernel of the position convolution as a direction and a
length for each tap (weight normalisation, Salimans & Kingma 2016), under names
that depend on PyTorch's version, or as one array. Ours is one array.
"""

import dataclasses
import os
import pathlib
from typing import Literal

from absl import logging
import numpy as np

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import files
from mod_jax.convert.files import Lazy
from mod_jax.errors import UserError
from mod_jax.models.wav2vec2 import Wav2Vec2Config

_LABEL = 'Hugging Face'
# Maps our names to Hugging Face's, without the prefix `wav2vec2.`.
_TABLE = {
  'conv_{}': 'feature_extractor.conv_layers.{}.conv.',
  'conv_norm_{}': 'feature_extractor.conv_layers.{}.layer_norm.',
  'feature_norm': 'feature_projection.layer_norm.',
  'project': 'feature_projection.projection.',
  'mask_embedding': 'masked_spec_embed',
  'position_conv': 'encoder.pos_conv_embed.conv.',
  'norm': 'encoder.layer_norm.',
  'block_{}/attention/query': 'encoder.layers.{}.attention.q_proj.',
  'block_{}/attention/key': 'encoder.layers.{}.attention.k_proj.',
  'block_{}/attention/value': 'encoder.layers.{}.attention.v_proj.',
  'block_{}/attention/out': 'encoder.layers.{}.attention.out_proj.',
  'block_{}/attention_norm': 'encoder.layers.{}.layer_norm.',
  'block_{}/mlp/up': 'encoder.layers.{}.feed_forward.intermediate_dense.',
  'block_{}/mlp/down': 'encoder.layers.{}.feed_forward.output_dense.',
  'block_{}/mlp_norm': 'encoder.layers.{}.final_layer_norm.',
  'head': 'lm_head.',
}
_PREFIX = 'wav2vec2.'
_POSITION = _TABLE['position_conv']
_FOLDED = f'{_POSITION}weight'
# Length and direction of the weight normalisation, in new and old PyTorch.
_NORMALISED = (
  tuple(f'{_POSITION}parametrizations.weight.original{i}' for i in (0, 1)),
  tuple(f'{_POSITION}weight_{x}' for x in 'gv'),
)
# Arrays that files may lack, and that are then initialised: a model that was
# only pretrained has no head, and a model that was trained without SpecAugment
# has no embedding of masked frames.
_OPTIONAL = ('lm_head.weight', 'lm_head.bias', 'masked_spec_embed')
# Arrays to ignore: heads of pretraining.
_UNUSED = (r'quantizer\..*', r'project_(hid|q)\..*')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """The fields of a `config.json` that are read, with their defaults."""

  model_type: Literal['wav2vec2']
  vocab_size: int = 32
  hidden_size: int = 768
  num_hidden_layers: int = 12
  num_attention_heads: int = 12
  intermediate_size: int = 3072
  conv_dim: tuple[int, ...] = (512,) * 7
  conv_kernel: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
  conv_stride: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
  conv_bias: bool = False
  num_conv_pos_embeddings: int = 128
  num_conv_pos_embedding_groups: int = 16
  feat_extract_norm: Literal['group', 'layer'] = 'group'
  do_stable_layer_norm: bool = False
  layer_norm_eps: Literal[1e-5] = 1e-5  # Fixed in norms of convolutions.
  hidden_act: Literal['gelu'] = 'gelu'
  feat_extract_activation: Literal['gelu'] = 'gelu'
  add_adapter: Literal[False] = False
  adapter_attn_dim: None = None


# Maps fields of `Wav2Vec2Config` to `_Fields`.
_SAME = {
  'vocab_size': 'vocab_size',
  'num_layers': 'num_hidden_layers',
  'width': 'hidden_size',
  'num_heads': 'num_attention_heads',
  'mlp_dim': 'intermediate_size',
  'conv_dims': 'conv_dim',
  'conv_kernels': 'conv_kernel',
  'conv_strides': 'conv_stride',
  'position_kernel': 'num_conv_pos_embeddings',
  'position_groups': 'num_conv_pos_embedding_groups',
}


def derive(folder: str | os.PathLike) -> Wav2Vec2Config:
  """Returns the config of a directory's model; UserError if not supported."""
  file = pathlib.Path(folder).expanduser() / 'config.json'
  fields = paths.read_object(file)
  theirs = config_lib.from_known(_Fields, fields, str(file))
  variant = theirs.feat_extract_norm
  for name in ('do_stable_layer_norm', 'conv_bias'):
    if getattr(theirs, name) != (variant == 'layer'):
      raise UserError(
        f'{file}: {name}={getattr(theirs, name)} is not supported in a Wav2Vec2'
        f' with feat_extract_norm={variant!r}.'
      )
  ours = {name: getattr(theirs, field) for name, field in _SAME.items()}
  return Wav2Vec2Config(variant=variant, **ours)


def _fold(arrays: dict[str, np.ndarray]) -> None:
  """Replaces two of `arrays`, those of weight normalisation, by one kernel."""
  for length, direction in _NORMALISED:
    if length in arrays and direction in arrays:
      direction_OIK = arrays.pop(direction)
      squares_OIK = np.square(direction_OIK, dtype=np.float64)
      norm_11K = np.sqrt(squares_OIK.sum(axis=(0, 1), keepdims=True))
      factor_11K = arrays.pop(length) / norm_11K
      arrays[_FOLDED] = np.float32(direction_OIK * factor_11K)


def read(path: str | os.PathLike, config: Wav2Vec2Config) -> dict[str, Lazy]:
  """Returns the parameters of a model that a file contains, by name.

  `path` is a file of weights of Hugging Face, or a directory with one. A head
  that is missing or of another size than the vocabulary is left out, with a
  warning. Routers and a missing embedding of masked frames are left out, too.
  """
  path = files.find(path)
  arrays = {
    name.removeprefix(_PREFIX): array
    for name, array in files.read(path).items()
  }
  _fold(arrays)
  shapes = arrays_lib.shapes_of(config.dense_twin())
  entries = arrays_lib.entries(shapes, _TABLE, _LABEL)
  new = {name for name in _OPTIONAL if name not in arrays}
  head = arrays.get('lm_head.weight')
  if head is not None and len(head) != config.vocab_size:
    new |= {'lm_head.weight', 'lm_head.bias'}
  if 'lm_head.weight' in new:
    there = 'there is none' if head is None else len(head)
    logging.warning(
      '%s: head is made new, for vocab_size=%d; %s in these weights.',
      *(path, config.vocab_size, there),
    )
  return arrays_lib.read(
    *(entries, arrays, new),
    dropped=_UNUSED,
    describe=f'{path}, a Wav2Vec2 of {_LABEL},',
  )

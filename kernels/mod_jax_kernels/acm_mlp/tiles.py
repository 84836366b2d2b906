"""Block sizes, see `mod_jax_kernels.tiles`; small arrays limit them further."""

# The products `up` and `down` compute blocks [rows, *_columns] in steps of
# `inner`. `up` has enough programs for wide blocks; in `down` two programs
# share a multiprocessor, which balances the last wave. `slope`, the first
# kernel of the gradient, writes two blocks. Gradients of weights are computed
# in blocks [weight_rows, weight_columns], in steps of `inner` tokens, for
# `weight_parts` parts of the tokens: without parts, some of 132 processors run
# three programs for a ViT-B, and others two; with four parts, nine or eight.
_TRITON = {
  'rows': 128,
  'inner': 64,
  'up_columns': 256,
  'up_warps': 8,
  'up_stages': 3,
  'down_columns': 128,
  'down_warps': 4,
  'down_stages': 3,
  'slope_columns': 128,
  'slope_warps': 8,
  'slope_stages': 3,
  'weight_rows': 128,
  'weight_columns': 64,
  'weight_warps': 4,
  'weight_stages': 4,
  'weight_parts': 4,
}
# A fourth stage of `up` needs at least 144 KiB of shared memory; GPUs for
# graphics and inference have 99.
_LARGE = {**_TRITON, 'up_stages': 4}

TILES = {
  'triton': {'': _TRITON, 'NVIDIA A100': _LARGE, 'NVIDIA H': _LARGE},
  # Maximum numbers of tokens per tile and of hidden units per step. A learner
  # runs on units of 128 tokens of a tile, of which the last need not be full:
  # small tiles waste more. Small steps read and write the sums more often.
  'pallas': {'': {'rows': 4096, 'hidden': 1024}},
}

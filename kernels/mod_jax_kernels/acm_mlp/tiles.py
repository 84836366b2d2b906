"""Block sizes, see `mod_jax_kernels.tiles`; at most the array's dimension."""

# The two products compute blocks of [rows, *_columns] in steps of `inner`. `up`
# has enough programs for wide blocks; in `down` two programs share a
# multiprocessor, which balances the last wave. `slope`, the first kernel of the
# gradient, has two accumulators. Gradients of weights compute blocks of
# [weight_rows, weight_columns] in steps of `inner` tokens, for as many parts of
# all. At ViT-B and 132 processors, without parts some would run three programs
# and others two; with four parts they run nine or eight.
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
  # Most tokens of a tile, of which each learner runs whole units of 128, and
  # hidden units of a step. Smaller tiles fill their last units less; smaller
  # steps read and write the sums more often.
  'pallas': {'': {'rows': 4096, 'hidden': 1024}},
}

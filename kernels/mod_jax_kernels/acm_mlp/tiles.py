"""Block sizes, see `mod_jax_kernels.tiles`; larger than a dimension is cut."""

# Two products of [rows, *_columns] over steps of `inner`. The first has so many
# programs that wide blocks pay; in the second two programs share a
# multiprocessor, which evens out the last wave. The gradient's first kernel
# holds two accumulators. Gradients of weights: [weight_rows, weight_columns]
# over steps of `inner` tokens, small for there are few of them.
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
}
# A fourth stage of the first product needs 144 KiB of shared memory or more,
# and cards for graphics and inference have 99.
_LARGE = {**_TRITON, 'up_stages': 4}

TILES = {
  'triton': {'': _TRITON, 'NVIDIA A100': _LARGE, 'NVIDIA H': _LARGE},
  # Tokens of a tile and hidden units of a step. With 512 tokens the products
  # take longer than reading the weights of the next step, on v5e and v5p.
  # Larger steps compile for half a minute: products are written out in full.
  'pallas': {'': {'rows': 512, 'hidden': 256}},
}

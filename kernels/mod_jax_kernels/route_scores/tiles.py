"""Block sizes, by device; see `mod_jax_kernels.tiles`."""

# Sizes for 16-bit floats. For float32, whose exact products cannot use tensor
# cores, `triton` limits the blocks further. Names of its sizes begin with the
# kernel. A program of a kernel holds a block of the size that is listed first,
# such as `forward_queries`, and loops over blocks of the second size.
TILES = {
  # Rows of up to `row` tokens are not cut into blocks.
  'pallas': {'': {'block': 512, 'row': 640}},
  'triton': {
    '': {
      'forward_queries': 128,
      'forward_keys': 64,
      'forward_warps': 4,
      'forward_stages': 3,
      'score_keys': 128,
      'score_queries': 64,
      'score_warps': 4,
      'score_stages': 3,
      'dq_queries': 64,
      'dq_keys': 64,
      'dq_warps': 4,
      'dq_stages': 2,
      'dkv_keys': 64,
      'dkv_queries': 64,
      'dkv_warps': 4,
      'dkv_stages': 2,
    },
  },
}

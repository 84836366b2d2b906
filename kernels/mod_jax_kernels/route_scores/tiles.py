"""Block sizes, by device; see `mod_jax_kernels.tiles`."""

# For 16-bit floats. For float32, whose exact products cannot use tensor cores,
# smaller blocks are derived. The names of sizes begin with the kernel, of which
# a program holds a block of the first kind and loops over those of the second.
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

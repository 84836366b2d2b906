"""Block sizes, by device; see `mod_jax_kernels.tiles`."""

# For 16-bit floats; float32, whose products no tensor core takes exactly, gets
# smaller blocks from these. Names: a pass, then what the number is of. A block
# of the first is held by a program, those of the other go by.
TILES = {
  'pallas': {'': {'block': 512}},
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

"""Block sizes of selection, by device; none has been measured yet."""

TILES = {
  # Keys in registers, of rows up to this length; and warps for so many.
  'triton': {'': {'block': 8192, 'num_warps': 8}},
  # Rows of a step, keys compared at a time, and slots filled at a time.
  'pallas': {'': {'rows': 8, 'block_l': 2048, 'block_k': 512}},
}

"""Block sizes of selection, by device; none has been measured yet."""

TILES = {
  # Maximum number of a row's keys held in registers, and warps for that many.
  'triton': {'': {'block': 8192, 'num_warps': 8}},
  # Rows per step, keys compared at a time, and slots filled at a time.
  'pallas': {'': {'rows': 8, 'block_l': 2048, 'block_k': 512}},
}

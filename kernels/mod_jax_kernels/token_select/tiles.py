"""Block sizes, by device; not tuned yet. `reference` explains sort keys."""

TILES = {
  # `block`: the largest number of sort keys of a row that a program holds in
  # registers. `num_warps`: warps for such a block; smaller blocks have fewer.
  'triton': {'': {'block': 8192, 'num_warps': 8}},
  # `rows`: rows per step. `block_l`: sort keys of a row compared at a time.
  # `block_k`: slots of a row of the result that are filled at a time.
  'pallas': {'': {'rows': 8, 'block_l': 2048, 'block_k': 512}},
}

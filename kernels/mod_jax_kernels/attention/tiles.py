"""Block sizes of splash attention, by device; not tuned yet."""

# Maximum numbers of queries and keys per step.
TILES = {'pallas': {'': {'block_q': 512, 'block_k': 512}}}

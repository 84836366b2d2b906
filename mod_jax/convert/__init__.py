"""Reads and writes weights in the formats of other libraries."""

"""Loads, uses, converts, exports and serves models."""

"""Linen modules, each with its config and its count of FLOPs."""

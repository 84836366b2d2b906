"""Trained and pretrained models: loads, routes and exports them."""

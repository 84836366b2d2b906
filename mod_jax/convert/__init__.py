"""Weights from elsewhere: of other libraries, and of other models of ours."""

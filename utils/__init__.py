"""Helpers for the training loops: small modules, each with one responsibility."""

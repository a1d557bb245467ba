"""Mechanisms that a training loop uses but does not show: small modules, one job each."""

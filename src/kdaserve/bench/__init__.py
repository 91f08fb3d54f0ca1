"""Measuring: cases and peers are data, every figure comes from one run, and none is given on a red check."""

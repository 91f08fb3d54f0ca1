"""Decode of one token a request, straight from the fused projection."""

"""Chunked prefill over indexed pool slots."""

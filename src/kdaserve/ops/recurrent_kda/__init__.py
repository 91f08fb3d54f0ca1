"""Prefill of a few tokens a request, token by token."""

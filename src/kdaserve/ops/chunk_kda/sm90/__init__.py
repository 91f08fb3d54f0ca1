"""The Hopper backend of `chunk_kda`, written in Gluon."""

"""A tiny trained model and a small serving engine on top of the library."""

"""What the Helion kernels of all ops share: their arithmetic, and how they are generated and launched."""

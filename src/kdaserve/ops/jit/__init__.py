"""What the Triton kernels of all ops share: their arithmetic, the states they save, and how they are launched."""

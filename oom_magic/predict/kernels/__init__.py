"""What CUDA's kernels take beyond their outputs, one file for each kind of operator; ``rules`` joins them."""

"""Long chains: what runs a schedule over steps of torch code, as one node of autograd's graph."""

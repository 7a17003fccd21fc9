"""Where tensors go that are kept off their device: a store takes a tensor, gives a ticket, and brings it back."""

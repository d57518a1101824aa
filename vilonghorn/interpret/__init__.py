"""Maps of what a backbone does with an image: attention, memory, receptive field, features, class activation."""

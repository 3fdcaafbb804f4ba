"""From the gradients of a backward to their sums in `parameter.grad`, and how parameters are held."""

"""What hpcdist sees of a program: modules, loop, loaders and optimizers; the only door to torch's hooks."""

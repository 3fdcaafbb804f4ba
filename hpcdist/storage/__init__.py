"""Where parameters live, if each rank has not its own: once on a host, or on parameter servers."""

"""Optional parts of runs, imported only by runs that use them."""

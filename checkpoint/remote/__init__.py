"""What a store over a network needs: URLs, calls that are tried again, files that are put whole."""

"""Memory that asynchronous saves are staged in, and the thread that writes them."""

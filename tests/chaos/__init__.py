"""Fault injection: interrupt a program again and again, and check that it finds what it had saved."""

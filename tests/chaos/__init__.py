"""Faults on purpose: a program is struck again and again, and must find what it was told is saved."""

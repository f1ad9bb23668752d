"""Runs of one program: what each is to the others, how it stands, what it measured. Needs no torch."""

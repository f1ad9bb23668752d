"""Ending early: who asks for it, how all processes come to know, and what is saved of a running epoch."""

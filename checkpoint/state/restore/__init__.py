"""Load leaves back into objects: everything is verified before anything changes."""

"""The log: records, branches, taking over, fencing, thinning, retention."""

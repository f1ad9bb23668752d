"""Programs and configurations as experiments: the verbs, and the runs that they make, choose and use."""

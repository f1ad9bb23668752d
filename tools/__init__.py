"""What people type and look at: the command line, pages about runs, the server of models, launches."""
